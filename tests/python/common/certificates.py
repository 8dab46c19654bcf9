"""Certificates for servers of tests."""

import ssl
import subprocess


def self_signed(folder, name):
    """The TLS context of a server with a certificate that it signed itself, and the file of that. `name` is the server's, such
    as `IP:127.0.0.1` or `DNS:localhost`."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", f"subjectAltName={name}", "-addext", "basicConstraints=critical,CA:FALSE", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate
