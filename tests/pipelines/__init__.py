"""Pipelines: schedules of ``torch.distributed.pipelining`` over gloo, and the same orders in one process."""
