"""Credentials of Azure: a shared access signature in a file, and a managed identity, which only an option allows."""

import base64
import datetime
import hmac
import json
from urllib.parse import quote, urlsplit

import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import load, save

import store_kinds
from http_server import serve_with
from program import DONE, FAILED
from store_kinds import ACCOUNT, ACCOUNT_KEY, AZURE_VERSION
from stores import BUCKET, NO_CREDENTIALS, SECRET

MODEL = save({"a": torch.arange(300_000.0)})


@pytest.fixture(scope="module")
def azurite():
    if not store_kinds.is_installed("azurite"):
        pytest.skip("azurite is not installed")
    store = store_kinds.Azurite()
    store.put("sas/a b/model.safetensors", MODEL)
    yield store
    store.end()


@pytest.fixture
def azure(azurite, monkeypatch):
    """The store, and an environment without a key of the account."""
    azurite.fault()
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("CKPTFS_NO_CACHE", "1")
    yield azurite
    azurite.fault()


def sign_access(hours=1):
    """The query string of a shared access signature that reads and lists the container."""
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
    end = end.strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = ["rl", "", end, f"/blob/{ACCOUNT}/{BUCKET}", "", "", "", AZURE_VERSION, "c", *[""] * 7]
    signature = base64.b64encode(hmac.digest(base64.b64decode(ACCOUNT_KEY), "\n".join(lines).encode(), "sha256")).decode()
    return f"sp=rl&se={quote(end)}&sv={AZURE_VERSION}&sr=c&sig={quote(signature, safe='')}"


def test_a_shared_access_signature_in_a_file(ckptfs, mounts, azure, tmp_path):
    file = tmp_path / "sas"
    file.write_text(sign_access() + "\n")
    url = f"az://{BUCKET}/sas?@{file}"
    listed = ckptfs("ls", "-r", "--json", url)
    assert listed.code == DONE, listed.stderr
    assert [entry["name"] for entry in listed.json()[0]["entries"]] == ["a b"]
    model = f"az://{BUCKET}/sas/a b?@{file}"
    assert load_file(model, backend="pread")["a"].tolist() == load(MODEL)["a"].tolist()
    mount = mounts(url, "--verbose")
    assert (mount / "a b/model.safetensors").read_bytes() == MODEL
    stats = azure.stats
    assert stats["requests"] > 3 and stats["authenticated"] == 0
    signature = file.read_text().partition("sig=")[2].strip()
    assert signature not in mount.logged() + listed.stdout + listed.stderr + open("/proc/mounts").read()
    # An expired signature.
    file.write_text(sign_access(hours=-1))
    refused = ckptfs("inspect", f"az://{BUCKET}/sas/a b/model.safetensors?@{file}")
    assert refused.code == FAILED and "it has expired, or belongs to another object" in refused.stderr
    assert f"write it to {file}" in refused.stderr and "sig=" not in refused.stderr


def test_the_variables_of_the_azure_cli_are_read(ckptfs, azure, monkeypatch):
    azure.put("cli/model.safetensors", MODEL)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)
    url = f"az://{BUCKET}/cli/model.safetensors"
    refused = ckptfs("inspect", url)
    assert refused.code == FAILED and "no credentials for Azure" in refused.stderr
    monkeypatch.setenv("AZURE_STORAGE_KEY", ACCOUNT_KEY)
    assert ckptfs("inspect", url).code == DONE
    checked = ckptfs("doctor", url)
    assert "the account's key (AZURE_STORAGE_KEY)" in checked.stdout


def test_empty_variables_do_not_count(ckptfs, azure, monkeypatch):
    azure.put("empty/model.safetensors", MODEL)
    monkeypatch.setenv("AZURE_STORAGE_KEY", ACCOUNT_KEY)
    for name in ("ACCOUNT_KEY", "SAS_TOKEN", "TOKEN"):
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", "")
    for name in ("CREDENTIAL_TYPE", "CLIENT_SECRET"):
        monkeypatch.setenv(f"AZURE_{name}", "")
    done = ckptfs("inspect", f"az://{BUCKET}/empty/model.safetensors")
    assert done.code == DONE, done.stderr


def test_the_emulator_needs_the_option_for_plain_http(ckptfs, azure, monkeypatch):
    azure.put("emulator/model.safetensors", MODEL)
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", azure.address)
    url = f"az://{BUCKET}/emulator/model.safetensors"
    monkeypatch.setenv("CKPTFS_ALLOW_HTTP", "0")
    refused = ckptfs("inspect", url)
    assert refused.code == FAILED and "not encrypted" in refused.stderr and azure.stats["requests"] == 0
    monkeypatch.setenv("CKPTFS_ALLOW_HTTP", "1")
    assert ckptfs("inspect", url).code == DONE


@pytest.mark.parametrize(
    "incomplete",
    [
        {}, {"AZURE_CLIENT_SECRET": "x"}, {"AZURE_CLIENT_ID": "x", "AZURE_TENANT_ID": "x"},
        {"AZURE_USE_AZURE_CLI": "false"}, {"AZURE_STORAGE_CLIENT_ID": "x", "AZURE_CLIENT_SECRET": "x"},
        {"AZURE_CREDENTIAL_TYPE": "managed_identity", "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY},
        {"AZURE_USE_AZURE_CLI": "false", "AZURE_Use_Azure_Cli": "true"},
    ],
)  # fmt: skip
def test_a_managed_identity_is_requested_only_with_the_option(ckptfs, monkeypatch, incomplete):
    token = f"{SECRET}-of-a-machine"
    metadata_headers, authorizations = [], []

    def answer(handler):
        path = urlsplit(handler.path).path
        if path == "/identity":
            metadata_headers.append(handler.headers["Metadata"])
            # Valid for an hour.
            end = datetime.datetime.now(datetime.UTC).timestamp() + 3600
            body = json.dumps({"access_token": token, "expires_on": str(int(end)), "token_type": "Bearer"}).encode()
            handler.send_response(200)
        else:
            authorizations.append(handler.headers["Authorization"])
            body = MODEL
            start, last = 0, len(body) - 1
            if handler.headers["Range"]:
                start, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
                body = body[start : last + 1]
            handler.send_response(206 if handler.headers["Range"] else 200)
            handler.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(MODEL)}")
            handler.send_header("ETag", '"a"')
            handler.send_header("Last-Modified", "Wed, 25 Nov 2026 10:00:00 GMT")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    with serve_with(answer) as address:
        for name, value in NO_CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        for name, value in {
            "CKPTFS_ALLOW_HTTP": "1", "CKPTFS_NO_CACHE": "1", "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ENDPOINT": f"{address}/{ACCOUNT}", "IDENTITY_ENDPOINT": f"{address}/identity",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        for name, value in incomplete.items():
            monkeypatch.setenv(name, value)
        url = f"az://{BUCKET}/model.safetensors"
        refused = ckptfs("inspect", url)
        assert refused.code == FAILED and "no credentials for Azure" in refused.stderr and "--instance-metadata" in refused.stderr
        assert not metadata_headers and not authorizations
        done = ckptfs("inspect", "--instance-metadata", url)
        assert done.code == DONE, done.stderr
        assert set(metadata_headers) == {"true"} and set(authorizations) == {f"Bearer {token}"}
        assert SECRET not in done.stdout + done.stderr
