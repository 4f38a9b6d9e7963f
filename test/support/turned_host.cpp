// csrc/turned_rows.cuh on a CPU.
#include "turned_rows.cuh"

extern "C" int turned_row(int g, int half) { return aoquant::decode::turned_row(g, half); }
extern "C" bool turned_swaps(int t) { return aoquant::decode::turned_swaps(t); }
extern "C" int piece_of_64(int row, int j) { return aoquant::decode::piece_of_64(row, j); }
