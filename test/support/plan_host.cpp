// csrc/linear_plan.cuh on a CPU.
#include "linear_plan.cuh"

// Each field of a plan: format, encodes, group, tile, half, then the shifts of even and of odd blocks.
extern "C" void unpack(int64_t packed, double* found) {
  const aoquant::LinearPlan plan(packed);
  const aoquant::DecodePlan packing = plan.packing();
  const double fields[] = {double(packing.format), double(plan.encodes), double(packing.group), double(packing.tile), double(plan.half),
                           packing.shift, packing.odd_shift};
  std::memcpy(found, fields, sizeof fields);
}
