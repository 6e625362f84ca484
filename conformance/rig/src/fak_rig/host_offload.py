"""A host-memory offload tier that the stock OffloadingConnector can use on the CPU platform.

vLLM's own CPUOffloadingSpec refuses any platform without an accelerator, because its
worker copies over CUDA streams. Everything above the worker (the scheduler half of the
connector, its LRU manager, its metrics and its KV events) is platform independent, so
replacing only the worker with a synchronous memcpy gives the real connector behaviour.

`fak_rig.stock_tier` puts it in the stock spec's place. By its own name it is selected with
  --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both",
    "kv_connector_extra_config":{"spec_name":"HostOffloadingSpec",
      "spec_module_path":"fak_rig.host_offload","cpu_bytes_to_use":268435456}}'
"""

import time

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    """The stock spec, with a worker that needs no accelerator."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = MemcpyWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker


class MemcpyWorker(OffloadingWorker):
    """Copies whole KV blocks between the engine's cache tensors and host chunks, at once."""

    def __init__(self, kv_caches, blocks_per_chunk: int, num_chunks: int):
        self._blocks_per_chunk = blocks_per_chunk
        self._engine = [
            t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors
        ]
        self._host = [
            torch.zeros((num_chunks * blocks_per_chunk, t.page_size_bytes), dtype=torch.int8)
            for t in kv_caches.tensors
        ]
        self._groups = kv_caches.group_data_refs
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, self._engine, self._host)

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, self._engine, self._host, load=True)

    def _copy(self, job_id, engine_spec, host_spec, engine, host, load=False) -> bool:
        started, moved, start, chunk_start = time.monotonic(), 0, 0, 0
        per_chunk = self._blocks_per_chunk
        groups = zip(self._groups, engine_spec.group_sizes, engine_spec.block_indices)
        for refs, size, block_index in groups:
            if size == 0:
                continue
            blocks = torch.from_numpy(engine_spec.block_ids[start : start + size]).long()
            # The first block may lie in the middle of its chunk, the last one too.
            skipped = block_index % per_chunk
            count = -(-(skipped + size) // per_chunk)
            chunks = torch.from_numpy(host_spec.block_ids[chunk_start : chunk_start + count]).long()
            pages = (chunks[:, None] * per_chunk + torch.arange(per_chunk)).flatten()
            pages = pages[skipped : skipped + size]
            for ref in refs:
                if load:
                    engine[ref.tensor_idx][blocks] = host[ref.tensor_idx][pages]
                else:
                    host[ref.tensor_idx][pages] = engine[ref.tensor_idx][blocks]
                moved += size * ref.page_size_bytes
            start += size
            chunk_start += count
        self._finished.append(
            TransferResult(job_id, True, moved, max(time.monotonic() - started, 1e-9))
        )
        return True

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids) -> None:
        """Nothing to wait for: a copy is finished when it is submitted."""
