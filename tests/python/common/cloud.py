"""A cloud on this machine that checks signatures. Before the store of stores.py it has AWS's token services (STS and SSO),
the service of a container and the metadata server of a machine. A web server in it demands the query string of a
presigned URL."""

import datetime
import hashlib
import hmac
import http.client
import http.server
import json
import secrets
import threading
import time
import urllib.parse

from stores import NO_CREDENTIALS, PATIENCE, SECRET

# Keys of a user that has not logged in: they may only assume roles.
USER_KEY, USER_SECRET = "key-of-a-user", f"{SECRET}-of-a-user"

SSO_TOKEN, IDENTITY_TOKEN = f"{SECRET}-of-sso", f"{SECRET}-of-an-identity"
CLIENT_SECRET = f"{SECRET}-of-a-client"
CONTAINER_TOKEN, METADATA_TOKEN = f"{SECRET}-of-a-container", f"{SECRET}-of-a-machine"


def sign(secret, text):
    return hmac.new(secret, text.encode(), hashlib.sha256).digest()


def is_signed_with(request, body, secret):
    """Whether the signature (version 4) of a request was made with a secret key."""
    fields = request.headers["Authorization"].removeprefix("AWS4-HMAC-SHA256 ").split(", ")
    fields = dict(field.split("=", 1) for field in fields)
    _, *scope = fields["Credential"].split("/")
    path, _, query = request.path.partition("?")
    pairs = sorted(pair if "=" in pair else f"{pair}=" for pair in query.split("&") if pair)
    names = fields["SignedHeaders"].split(";")
    headers = "".join(f"{name}:{' '.join(request.headers[name].split())}\n" for name in names)
    digest = request.headers["x-amz-content-sha256"]
    if digest not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
        return False
    canonical = "\n".join([request.command, path, "&".join(pairs), headers, ";".join(names), digest])
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers["x-amz-date"], "/".join(scope), hashed])
    key = f"AWS4{secret}".encode()
    for part in scope:
        key = sign(key, part)
    return hmac.compare_digest(sign(key, text).hex(), fields["Signature"])


class Cloud:
    """Answers at `address`. `issued` counts the credentials of each service, `lifetime` is that of the next ones."""

    def __init__(self, store):
        self.store_port = store.server_port
        self.lock = threading.Lock()
        self.reset()
        cloud = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                cloud.answer(self)

            do_HEAD = do_POST = do_PUT = do_PROPFIND = do_GET

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reset(self):
        # Keys that the store accepts: the secret, the token, and when they expire.
        self.keys, self.issued, self.lifetime, self.refused = {}, {}, 3600, 0
        # Tokens of logins, and refresh tokens. Each refresh token is accepted once.
        self.sso_tokens, self.refresh_tokens = {SSO_TOKEN}, set()
        # Called before a login is renewed.
        self.during_renewal = lambda: None
        # Requests that reached the store, and after how many of them all keys expire.
        self.served, self.expires_after = 0, None
        # The token that the service of a container asks for; None if it asks for none. It may redirect elsewhere.
        self.container_token, self.container_redirect = None, None
        # Headers that came with requests to a proxy.
        self.proxied = []
        # Tokens of requests to Google Cloud.
        self.bearers = []
        # Query strings that the web server accepts, the bytes that it has at each path, and where it redirects.
        self.queries, self.files, self.redirects, self.requests = set(), {}, {}, []

    @property
    def environment(self):
        return NO_CREDENTIALS | {"AWS_ENDPOINT_URL": self.address, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}

    def issue(self, service, lifetime=None):
        """New keys, for some seconds."""
        with self.lock:
            number = self.issued[service] = self.issued.get(service, 0) + 1
        key = f"{service}-{number}"
        secret, token = f"{SECRET}-{key}", f"{SECRET}-token-{key}"
        expires = time.time() + (self.lifetime if lifetime is None else lifetime)
        self.keys[key] = (secret, token, expires)
        return key, secret, token, expires

    def expire(self):
        """Expires all keys before their stated time."""
        self.keys = {key: (secret, token, 0) for key, (secret, token, _) in self.keys.items()}

    def answer(self, request):
        if request.path.startswith("http://"):
            self.proxied.append(dict(request.headers))
            return self.send(request, 502, "")
        path, _, query = request.path.partition("?")
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append((request.command, request.path))
        if request.command == "POST" and path == "/":
            return self.answer_sts(request, body, dict(urllib.parse.parse_qsl(body.decode())))
        if request.command == "POST" and path == "/token":
            return self.answer_refresh(request, json.loads(body))
        if path == "/federation/credentials":
            return self.answer_sso(request, dict(urllib.parse.parse_qsl(query)))
        if path == "/container/credentials":
            return self.answer_container(request)
        if path.startswith("/latest/"):
            return self.answer_metadata(request, path)
        if path.startswith("/web/"):
            return self.answer_web(request, path, query)
        return self.answer_store(request, body)

    def answer_sts(self, request, body, form):
        action = form.get("Action")
        allowed = False
        if action == "AssumeRole":
            key = request.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
            secret = USER_SECRET if key == USER_KEY else self.keys.get(key, ("", "", 0))[0]
            allowed = is_signed_with(request, body, secret)
        elif action == "AssumeRoleWithWebIdentity":
            allowed = form["WebIdentityToken"] == IDENTITY_TOKEN and "Authorization" not in request.headers
        if not allowed or "denied" in form["RoleArn"]:
            text = "<ErrorResponse><Error><Code>AccessDenied</Code><Message>not for you</Message></Error></ErrorResponse>"
            return self.send(request, 403, text)
        key, secret, token, expires = self.issue(action)
        text = (
            f"<{action}Response><{action}Result><Credentials><AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}"
            f"</SecretAccessKey><SessionToken>{token}</SessionToken><Expiration>{to_text(expires)}</Expiration>"
            f"</Credentials></{action}Result></{action}Response>"
        )
        return self.send(request, 200, text)

    def answer_sso(self, request, query):
        if request.headers["x-amz-sso_bearer_token"] not in self.sso_tokens:
            return self.send(request, 401, '{"message": "Session token not found or invalid"}')
        if query != {"account_id": "123", "role_name": "Reader"}:
            return self.send(request, 403, '{"message": "No access"}')
        key, secret, token, expires = self.issue("sso")
        found = {"accessKeyId": key, "secretAccessKey": secret, "sessionToken": token, "expiration": int(expires * 1000)}
        return self.send(request, 200, json.dumps({"roleCredentials": found}))

    def answer_container(self, request):
        if self.container_redirect:
            return self.send(request, 302, "", {"Location": self.container_redirect})
        if request.headers["Authorization"] != self.container_token:
            return self.send(request, 401, "Invalid token")
        return self.send(request, 200, self.issue_document("container"))

    def answer_metadata(self, request, path):
        """As the metadata server of a machine, which gives a token first (IMDSv2)."""
        credentials = "/latest/meta-data/iam/security-credentials/"
        if (request.command, path) == ("PUT", "/latest/api/token"):
            return self.send(request, 200, METADATA_TOKEN)
        if request.headers["X-aws-ec2-metadata-token"] != METADATA_TOKEN:
            return self.send(request, 401, "")
        contents = {credentials: lambda: "reader", f"{credentials}reader": lambda: self.issue_document("instance")}
        return self.send(request, 200, contents[path]()) if path in contents else self.send(request, 404, "")

    def issue_document(self, service):
        """New keys, as services on a machine write them."""
        key, secret, token, expires = self.issue(service)
        return json.dumps({
            "AccessKeyId": key, "SecretAccessKey": secret, "Token": token, "Expiration": to_text(expires),
        })  # fmt: skip

    def answer_refresh(self, request, body):
        """Sends a new token of a login, for its refresh token."""
        with self.lock:
            is_known = body.get("refreshToken") in self.refresh_tokens
            self.refresh_tokens.discard(body.get("refreshToken"))
        client = {"grantType": "refresh_token", "clientId": "client", "clientSecret": CLIENT_SECRET}
        if not is_known or body != client | {"refreshToken": body["refreshToken"]}:
            return self.send(request, 400, '{"error": "invalid_grant"}')
        self.during_renewal()
        number = self.issued["login"] = self.issued.get("login", 0) + 1
        token, refresh_token = f"{SSO_TOKEN}-{number}", f"{SECRET}-refresh-{number}"
        self.sso_tokens.add(token)
        self.refresh_tokens.add(refresh_token)
        found = {"accessToken": token, "expiresIn": 3600, "refreshToken": refresh_token, "tokenType": "Bearer"}
        return self.send(request, 200, json.dumps(found))

    def answer_store(self, request, body):
        authorization = request.headers["Authorization"] or ""
        if authorization.startswith("Bearer "):
            # As Google Cloud, which has no such object.
            self.bearers.append(authorization.removeprefix("Bearer "))
            return self.send(request, 404, "")
        key = authorization.partition("Credential=")[2].partition("/")[0]
        secret, token, expires = self.keys.get(key, ("", "", 0))
        if not secret or not is_signed_with(request, body, secret) or request.headers["x-amz-security-token"] != token:
            return self.send(request, 403, "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
        if expires < time.time():
            self.refused += 1
            text = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
            return self.send(request, 400, text)
        with self.lock:
            self.served += 1
            if self.served == self.expires_after:
                self.expire()
        connection = http.client.HTTPConnection("127.0.0.1", self.store_port, timeout=PATIENCE)
        connection.request(request.command, request.path, body, dict(request.headers))
        answer = connection.getresponse()
        content = answer.read()
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in ("connection", "date", "server")}
        length = headers.pop("Content-Length", len(content))
        return self.send(request, answer.status, content, headers, length)

    def answer_web(self, request, path, query):
        if path in self.redirects:
            return self.send(request, 302, "", {"Location": self.redirects[path]})
        # As presigned URLs: another method is another signature.
        if request.command != "GET" or (self.queries and query not in self.queries):
            return self.send(request, 403, f"<Error><Message>no {request.path} for you</Message></Error>")
        content = self.files.get(path)
        if content is None:
            return self.send(request, 404, "not here")
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
        wanted = request.headers["Range"]
        if not wanted:
            return self.send(request, 200, content, headers)
        start, end = wanted.removeprefix("bytes=").split("-")
        start, end = int(start), min(int(end or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        return self.send(request, 206, content[start : end + 1], headers)

    def send(self, request, status, content, headers=(), length=None):
        content = content.encode() if isinstance(content, str) else content
        request.send_response(status)
        for name, value in dict(headers).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content) if length is None else length))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def end(self):
        self.server.shutdown()
        self.server.server_close()


def to_text(seconds):
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_query():
    """The query string of a presigned URL."""
    signature = f"{SECRET}-{secrets.token_hex(8)}"
    return f"X-Amz-Credential={USER_KEY}%2F20260101%2Fus-east-1%2Fs3&X-Amz-Expires=60&X-Amz-Signature={signature}"
