"""The plugin keeps out of a vLLM that it was not tested with. vLLM is imported; no engine runs."""

import os
import unittest
from unittest import mock

import vllm.version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.entrypoints.serve.dev.sleep import api_router as sleep_routes
from vllm.v1.engine.core import EngineCore

import vllm_keep_tier
from vllm_keep_tier import compatibility


class Compatibility(unittest.TestCase):
    def setUp(self) -> None:
        asked_for = mock.patch.dict(os.environ, {"VLLM_KEEP_TIER": "1"})
        self.replace = mock.patch.object(vllm_keep_tier, "_replace").start()
        mock.patch.object(vllm_keep_tier, "_is_loaded", False).start()
        self.addCleanup(mock.patch.stopall)
        asked_for.start()

    def assert_not_loaded(self, reason: str) -> None:
        with self.assertLogs("vllm.keep_tier", "WARNING") as logs:
            vllm_keep_tier.register()
        self.assertIn("NOT loaded", logs.output[0])
        self.assertIn(reason, logs.output[0])
        self.replace.assert_not_called()

    def test_tested_version_is_loaded_once_and_says_what_it_replaces(self) -> None:
        with self.assertLogs("vllm.keep_tier", "WARNING") as logs:
            vllm_keep_tier.register()
            vllm_keep_tier.register()
        self.replace.assert_called_once_with()
        self.assertEqual(len(logs.output), 1)
        self.assertIn("replaces functions of vLLM 0.32.0 at run time", logs.output[0])
        self.assertIn("EngineCore._finish_pause", logs.output[0])
        self.assertNotIn("EngineCore._reset_caches", logs.output[0])

    def test_off_unless_asked_for(self) -> None:
        for value in (None, "", "0", "true"):
            with self.subTest(value=value):
                os.environ.pop("VLLM_KEEP_TIER", None)
                if value is not None:
                    os.environ["VLLM_KEEP_TIER"] = value
                with self.assertNoLogs("vllm.keep_tier"):
                    vllm_keep_tier.register()
                self.replace.assert_not_called()

    def test_other_versions(self) -> None:
        for version in ("0.31.0", "0.32.1", "0.33.0", "0.32.0rc1", "0.32.0.post1", "dev"):
            with self.subTest(version=version):
                with mock.patch.object(vllm.version, "__version__", version):
                    self.assert_not_loaded(f"vLLM is {version}")

    def test_local_label_is_the_same_release(self) -> None:
        with mock.patch.object(vllm.version, "__version__", "0.32.0+cu129"):
            self.assertEqual(compatibility.differences(), [])

    def test_changed_signature(self) -> None:
        def sleep(self, level=1, mode="abort", tags=None):
            raise AssertionError("not called")

        with mock.patch.object(EngineCore, "sleep", sleep):
            self.assert_not_loaded(
                "EngineCore.sleep takes (self, level=1, mode='abort', tags=None)"
            )

    def test_changed_body(self) -> None:
        def build_connector_meta(self, scheduler_output):
            raise AssertionError("not called")

        with mock.patch.object(
            OffloadingConnectorScheduler, "build_connector_meta", build_connector_meta
        ):
            self.assert_not_loaded("build_connector_meta is not the function of a tested release")

    def test_absent_function(self) -> None:
        finish_pause = EngineCore._finish_pause
        del EngineCore._finish_pause
        try:
            self.assert_not_loaded("EngineCore._finish_pause cannot be examined")
        finally:
            EngineCore._finish_pause = finish_pause

    def test_absent_route(self) -> None:
        others = [each for each in sleep_routes.router.routes if each.path != "/sleep"]
        with mock.patch.object(sleep_routes.router, "routes", others):
            self.assert_not_loaded("/sleep is not served by")

    def test_route_that_is_replaced_already(self) -> None:
        async def sleep(raw_request, level=1, mode="abort"):
            raise AssertionError("not called")

        [route] = [each for each in sleep_routes.router.routes if each.path == "/sleep"]
        with mock.patch.object(route, "endpoint", sleep):
            self.assert_not_loaded("/sleep is not served by")
