"""Train a model to bitwise identical weights, however it is replicated, sharded or pipelined."""

from echelon.train.same_bits.fingerprints import fingerprint
from echelon.train.same_bits.micro_random import micro_batch_random, micro_batch_seed
from echelon.train.same_bits.pipeline import SameBitsPipeline
from echelon.train.same_bits.same_bits import SameBits

__all__ = ["SameBits", "SameBitsPipeline", "fingerprint", "micro_batch_random", "micro_batch_seed"]
