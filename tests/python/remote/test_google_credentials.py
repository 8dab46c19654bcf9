"""Google's application default credentials: the key of a service account, and the login of a user."""

import json
import socket
import subprocess
import threading
import urllib.parse
from contextlib import contextmanager

import pytest

from certificates import self_signed
from program import FAILED
from stores import SECRET

# Google's address for tokens of users. No variable names another one.
TOKEN_HOST = "accounts.google.com"


@pytest.mark.parametrize("variable", ["HOME", "CLOUDSDK_CONFIG", "GOOGLE_APPLICATION_CREDENTIALS"])
def test_the_application_default_credentials_of_google(ckptfs, cloud, tmp_path, monkeypatch, variable):
    key = subprocess.run(["openssl", "genrsa", "-traditional", "2048"], capture_output=True, text=True, check=True).stdout
    monkeypatch.setenv("GOOGLE_BASE_URL", cloud.address)
    refused = ckptfs("inspect", "gs://bucket/model.safetensors")
    assert refused.code == FAILED and "gcloud auth application-default login" in refused.stderr
    folder = tmp_path / (".config/gcloud" if variable == "HOME" else "elsewhere")
    folder.mkdir(parents=True)
    file = folder / "application_default_credentials.json"
    account = {"type": "service_account", "private_key": key, "private_key_id": "id", "client_email": "me@example.com"}
    file.write_text(json.dumps(account))
    monkeypatch.setenv(variable, str({"HOME": tmp_path, "CLOUDSDK_CONFIG": folder}.get(variable, file)))
    assert "PRIVATE" not in ckptfs("inspect", "gs://bucket/model.safetensors").stderr
    # A token that the key has signed.
    assert cloud.bearers and all(bearer.count(".") == 2 for bearer in cloud.bearers)


@contextmanager
def google_behind_a_proxy(folder, answer):
    """A proxy behind which Google's token service answers with `answer(form)`: a status and a body. Gives its address and
    the certificate of the service."""
    context, certificate = self_signed(folder, f"DNS:{TOKEN_HOST}")
    listener = socket.create_server(("127.0.0.1", 0))

    def read_head(connection):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(1) or b"\r\n\r\n"
        return head.decode().lower()

    def serve(connection):
        if not read_head(connection).startswith(f"connect {TOKEN_HOST}:443 "):
            return connection.close()
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with context.wrap_socket(connection, server_side=True) as encrypted:
            head = read_head(encrypted)
            length = int(head.partition("content-length:")[2].split()[0])
            body = b""
            while len(body) < length:
                body += encrypted.recv(length - len(body))
            assert head.startswith("post /o/oauth2/token ")
            status, text = answer(dict(urllib.parse.parse_qsl(body.decode())))
            encrypted.sendall(f"HTTP/1.1 {status} -\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", certificate
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize("is_valid", [True, False])
def test_the_login_of_a_user_is_sent_to_google_and_never_shown(ckptfs, cloud, tmp_path, monkeypatch, is_valid):
    login = {"type": "authorized_user", "client_id": "gcloud", "client_secret": f"{SECRET}-1", "refresh_token": f"{SECRET}-2"}
    (tmp_path / "login.json").write_text(json.dumps(login))
    forms = []

    def answer(form):
        forms.append(form)
        if not is_valid:
            return 400, json.dumps({"error": "invalid_grant", "error_description": f"Bad token {SECRET}-2"})
        return 200, json.dumps({"access_token": f"{SECRET}-3", "expires_in": 3600, "token_type": "Bearer"})

    with google_behind_a_proxy(tmp_path, answer) as (proxy, certificate):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        monkeypatch.setenv("GOOGLE_BASE_URL", cloud.address)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "login.json"))
        done = ckptfs("inspect", "gs://bucket/model.safetensors", "--outage-timeout", "5")
    assert done.code == FAILED and "gs://bucket/model.safetensors" in done.stderr and "what to do: " in done.stderr
    assert SECRET not in done.stdout + done.stderr
    sent = {"grant_type": "refresh_token"} | {name: value for name, value in login.items() if name != "type"}
    assert forms and all(form == sent for form in forms)
    if is_valid:
        # The store was asked with the token, and has no such object.
        assert cloud.bearers and set(cloud.bearers) == {f"{SECRET}-3"}
    else:
        assert cloud.bearers == [] and "expired, or are no longer valid" in done.stderr and "log in again" in done.stderr, done
