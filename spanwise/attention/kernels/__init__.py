"""Local attention kernels: one file a kernel, one table of them (`table`), and the merge of partial results (`merge`).

Kernels know nothing of ranks. They get q, k, v and spans, and return out and lse; see `base.Kernel`.
"""
