"""Where there is a page copier, and what it is made of."""

from __future__ import annotations

import unittest
from unittest.mock import patch

import torch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.copies.cuda import page_copier
from sglang.srt.mem_cache.hicache.copies.cuda.page_copier import CopyTuning

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

MAPS = ["the maps of all kinds"]


class TestPageCopier(CustomTestCase):
    def made(
        self,
        *,
        device: str = "cuda:1",
        io_backend: str = "kernel",
        cuda: str | None = "13.0",
        maps: list[str] | None = MAPS,
        tuning: CopyTuning | None = None,
    ) -> CopyTuning | None:
        """The tuning of the copier that is made, or None if none is."""
        with (
            patch.object(torch.version, "cuda", cuda),
            patch.object(page_copier, "page_maps", return_value=maps),
            patch.object(page_copier, "CudaPageCopier") as copier,
        ):
            found = page_copier.page_copier([], page_size=64, device=device, io_backend=io_backend, tuning=tuning)
        if found is None:
            copier.assert_not_called()
            return None
        ((given,), keywords) = copier.call_args
        self.assertIs(given, MAPS)
        self.assertEqual(keywords["device"], torch.device(device))
        chosen = keywords["tuning"]
        assert isinstance(chosen, CopyTuning)
        return chosen

    def test_other_devices_and_scattered_pages_are_left_to_sglangs_engine(self) -> None:
        self.assertIsNone(self.made(device="cpu"))
        self.assertIsNone(self.made(cuda=None), "torch for another accelerator that is called cuda")
        self.assertIsNone(self.made(maps=None))

    def test_direct_means_copy_engines_alone_and_a_tuning_overrides_the_backend(self) -> None:
        self.assertEqual(self.made(), CopyTuning())
        self.assertEqual(self.made(io_backend="direct"), CopyTuning(long_copy_bytes=0))
        own = CopyTuning(few_copies=7)
        self.assertEqual([self.made(io_backend=backend, tuning=own) for backend in ("kernel", "direct")], [own, own])


if __name__ == "__main__":
    unittest.main()
