"""GEMM backends: one file per kernel family, each with what it computes, when it can, and how it is called."""
