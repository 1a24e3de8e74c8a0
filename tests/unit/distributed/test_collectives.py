"""What needs no other rank. On real ranks: tests/dist/test_comm.py."""

import torch

from shardwise.distributed import collectives


def test_tensors_of_any_dtype_follow_one_another_in_a_buffer() -> None:
    tensors = [[torch.arange(3.0).bfloat16(), torch.arange(2.0)], [], [torch.arange(5, dtype=torch.uint8)]]
    tensors[2].append(torch.arange(4.0).double().view(2, 2))
    buffer = torch.zeros(sum(collectives._slot_bytes(one) for each in tensors for one in each), dtype=torch.uint8)
    for slot, tensor in collectives._slots(buffer, tensors):
        slot.copy_(tensor)
    for slot, tensor in collectives._slots(buffer, tensors):
        assert torch.equal(slot, tensor)
