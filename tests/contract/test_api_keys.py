"""API keys from a mounted file: who has none gets 401, a swap of links changes them, a broken file changes nothing."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from live_server import BUNDLED, START, LiveServer, eventually, running


def line(name: str, key: str) -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}\n"


class MountedSecret:
    """A directory that changes as the kubelet changes one: new content in a new directory, then a swap of `..data`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._version = 0
        directory.mkdir()
        self.path = directory / "keys"
        os.symlink("..data/keys", self.path)

    def write(self, content: str) -> None:
        self._version += 1
        version = self._directory / f"..v{self._version}"
        version.mkdir()
        (version / "keys").write_text(content)
        os.symlink(version.name, self._directory / "..data_tmp")
        os.rename(self._directory / "..data_tmp", self._directory / "..data")


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> MountedSecret:
    mounted = MountedSecret(tmp_path_factory.mktemp("keys") / "mounted")
    mounted.write(line("web", "key-of-web") + line("batch", "key-of-batch"))
    return mounted


@pytest.fixture(scope="module")
def guarded(secret: MountedSecret, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with running(
        tmp_path_factory.mktemp("guarded"), f"--api-keys-file={secret.path}", "--max-sequence-length=512"
    ) as server:
        yield server


def status(server: LiveServer, key: str | None, path: str = "/v1/models") -> int:
    return server.http.get(path, headers={"Authorization": f"Bearer {key}"} if key else {}).status_code


def complete(server: LiveServer, key: str, prompt: str = "Hello") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", "X-Busload-Tenant": "whoever"}
    return server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers=headers)


def test_without_a_key_only_health_and_metrics_answer(guarded: LiveServer) -> None:
    for path in ("/health", "/health/startup", "/health/ready", "/health/live", "/metrics"):
        assert status(guarded, None, path) == 200
    for path in ("/v1/models", "/v1/nothing", "/", "/tokenize", "/openapi.json", "/metrics/", "/healthy"):
        assert status(guarded, None, path) == 401, path
    refused = guarded.complete(prompt="x" * 3_000_000)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert "x-request-id" in refused.headers
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client:
        request = client.completions.create
        with pytest.raises(openai.AuthenticationError):
            request(model=BUNDLED, prompt="Hello", max_tokens=1)
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="key-of-web", max_retries=0) as client:
        assert client.completions.create(model=BUNDLED, prompt="Hello", max_tokens=1).usage is not None


def test_two_keys_share_no_cached_prefix_whatever_their_headers_say(guarded: LiveServer) -> None:
    prompt = "A long shared beginning, which is cached once and then found again by its owner. " * 4

    def cached(key: str) -> int:
        return int(complete(guarded, key, prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("key-of-web") == 0
    assert cached("key-of-web") > 48
    assert cached("key-of-batch") == 0


def test_tenants_are_called_by_name_and_keys_by_nothing(guarded: LiveServer) -> None:
    assert complete(guarded, "key-of-batch").status_code == 200
    eventually(lambda: guarded.lines()[-1].get("tenant") == "batch")
    assert "key-of" not in guarded.log
    found = guarded.metrics()
    assert found['busload_tenant_tokens_total{tenant="batch"}'] > 0
    assert found["busload_api_keys"] == 2


def test_a_changed_secret_counts_and_a_broken_one_does_not(guarded: LiveServer, secret: MountedSecret) -> None:
    assert status(guarded, "key-of-web") == 200
    secret.write(line("web", "key-of-web") + line("web", "new-key-of-web"))
    eventually(lambda: status(guarded, "new-key-of-web") == 200)
    assert status(guarded, "key-of-web") == 200
    assert status(guarded, "key-of-batch") == 401
    errors = guarded.level("busload_api_keys_errors_total")
    secret.write("web:plain-text\n")
    eventually(lambda: guarded.level("busload_api_keys_errors_total") == errors + 1)
    assert "the keys that were in force stay: line 1: the hash of web must be" in guarded.log
    assert "plain-text" not in guarded.log
    secret.write("")
    eventually(lambda: guarded.level("busload_api_keys_errors_total") == errors + 2)
    assert status(guarded, "new-key-of-web") == 200
    secret.write(line("web", "newest-key-of-web"))
    eventually(lambda: status(guarded, "newest-key-of-web") == 200)
    assert status(guarded, "new-key-of-web") == 401
    assert "1 keys of 1 tenants in force" in guarded.log


@pytest.mark.parametrize("content", [None, "", "web:plain-text\n"])
def test_a_file_without_a_key_is_refused_at_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    command = [sys.executable, "-c", START, "serve", "--port=0", f"--api-keys-file={path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"--api-keys-file {path}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "plain-text" not in done.stderr
