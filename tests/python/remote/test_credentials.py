"""Credentials as users of AWS have them, each by a profile or a variable: what they lead to, and that they are renewed."""

import hashlib
import json
import os
import subprocess
import sys
import time

import pytest

import cloud as clouds
from cloud import CLIENT_SECRET, CONTAINER_TOKEN, IDENTITY_TOKEN, SSO_TOKEN, USER_KEY, USER_SECRET, to_text
from program import FAILED, find_binary
from stores import SECRET

ROLE = "arn:aws:iam::123:role/reader"


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Writes the files of `~/.aws`, and selects the profile `me`."""

    def configure(config="", secrets=""):
        for name, variable, text in (
            ("config", "AWS_CONFIG_FILE", config), ("credentials", "AWS_SHARED_CREDENTIALS_FILE", secrets),
        ):
            # As programs do: readers see the old file or the new one.
            (tmp_path / f"{name}.new").write_text(text)
            os.replace(tmp_path / f"{name}.new", tmp_path / name)
            monkeypatch.setenv(variable, str(tmp_path / name))
        monkeypatch.setenv("AWS_PROFILE", "me")

    return configure


def keys(profile, key, secret, token=None):
    text = f"[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    return text + (f"aws_session_token = {token}\n" if token else "")


@pytest.mark.parametrize("endpoint", ["https://me:{}@127.0.0.1:9", "me:{}@127.0.0.1:9", "https://127.0.0.1:9/?sig={}"])
def test_an_endpoint_with_credentials_is_refused_and_not_shown(cloud, ckptfs, monkeypatch, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint.format(SECRET))
    for words in (["inspect", "s3://bucket/model"], ["ls", "--offline", "s3://bucket/model"]):
        outcome = ckptfs(*words)
        shown = outcome.stdout + outcome.stderr
        assert outcome.code == FAILED and "the endpoint of the store has a user name, a password" in shown, outcome
        assert SECRET not in shown
    outcome = ckptfs("doctor", "s3://bucket/model")
    assert outcome.code == FAILED and SECRET not in outcome.stdout + outcome.stderr


def log_in(home, cache_name, expires, **more):
    """Leaves a login as `aws sso login` does, and returns its file."""
    folder = home / ".aws/sso/cache"
    folder.mkdir(parents=True, exist_ok=True)
    token = {"accessToken": SSO_TOKEN, "expiresAt": to_text(expires), "region": "us-east-1"} | more
    file = folder / f"{hashlib.sha1(cache_name.encode()).hexdigest()}.json"
    file.write_text(json.dumps(token))
    return file


def check(ckptfs, models):
    folder, url, _ = models
    found = ckptfs("inspect", "--json", f"{url}/sharded")
    assert found.code == 0, found.stderr
    layout = lambda about: about["virtual_file"]["layout"]
    assert layout(found.json()) == layout(ckptfs.inspect(folder / "sharded"))


def check_refused(ckptfs, models, *words):
    refused = ckptfs("inspect", f"{models[1]}/sharded")
    assert refused.code == FAILED, refused
    assert all(word in refused.stderr for word in (models[1], "what to do: ", *words)), refused.stderr
    assert SECRET not in refused.stderr


def test_a_profile_with_keys(ckptfs, cloud, models, configure):
    configure("[profile me]\n", keys("me", *cloud.issue("user")[:3]))
    check(ckptfs, models)


@pytest.mark.parametrize("kind", ["session", "address"])
def test_a_login_with_sso(ckptfs, cloud, models, configure, tmp_path, kind):
    account = "sso_account_id = 123\nsso_role_name = Reader\n"
    start = "sso_start_url = https://example.awsapps.com/start\nsso_region = us-east-1\n"
    if kind == "session":
        configure(f"[profile me]\nsso_session = work\n{account}[sso-session work]\n{start}")
    else:
        configure(f"[profile me]\n{account}{start}")
    name = "work" if kind == "session" else "https://example.awsapps.com/start"
    check_refused(ckptfs, models, "no login with SSO", "what to do: aws sso login --profile me\n")
    log_in(tmp_path, name, time.time() - 5)
    check_refused(ckptfs, models, "has expired", "what to do: aws sso login --profile me\n")
    log_in(tmp_path, name, time.time() + 600)
    check(ckptfs, models)
    assert cloud.issued == {"sso": 1}


SSO_SESSION = (
    "[profile me]\nsso_session = work\nsso_account_id = 123\nsso_role_name = Reader\n"
    "[sso-session work]\nsso_start_url = https://example.awsapps.com/start\nsso_region = us-east-1\n"
)


def refresh_fields(cloud):
    """The fields by which a login is renewed."""
    cloud.refresh_tokens.add(f"{SECRET}-refresh")
    return {
        "refreshToken": f"{SECRET}-refresh", "clientId": "client", "clientSecret": CLIENT_SECRET,
        "registrationExpiresAt": to_text(time.time() + 86_400), "startUrl": "https://example.awsapps.com/start",
    }  # fmt: skip


@pytest.mark.parametrize("seconds_left", [-5, 60])
def test_a_login_with_sso_is_renewed_by_its_refresh_token(ckptfs, cloud, models, configure, tmp_path, seconds_left):
    configure(SSO_SESSION)
    file = log_in(tmp_path, "work", time.time() + seconds_left, **refresh_fields(cloud))
    check(ckptfs, models)
    assert cloud.issued == {"login": 1, "sso": 1}
    # The file has the new tokens: each refresh token is accepted once.
    saved = json.loads(file.read_text())
    assert saved["accessToken"] == f"{SSO_TOKEN}-1" and saved["refreshToken"] == f"{SECRET}-refresh-1"
    assert saved["clientId"] == "client" and saved["startUrl"] and saved["expiresAt"] > to_text(time.time() + 3000)
    assert file.stat().st_mode & 0o777 == 0o600 and [file.name] == os.listdir(file.parent)
    check(ckptfs, models)
    assert cloud.issued == {"login": 1, "sso": 2}
    file.write_text(json.dumps(saved | {"expiresAt": to_text(time.time() - 5)}))
    check(ckptfs, models)
    assert cloud.issued == {"login": 2, "sso": 3}


def test_a_login_of_the_user_during_a_renewal_stays(ckptfs, cloud, models, configure, tmp_path):
    configure(SSO_SESSION)
    fields = refresh_fields(cloud)
    file = log_in(tmp_path, "work", time.time() - 5, **fields)
    in_an_hour = time.time() + 3600
    cloud.during_renewal = lambda: log_in(tmp_path, "work", in_an_hour, **fields)
    check(ckptfs, models)
    assert cloud.issued == {"login": 1, "sso": 1}
    saved = json.loads(file.read_text())
    assert saved["accessToken"] == SSO_TOKEN and saved["expiresAt"] == to_text(in_an_hour)


def test_a_login_with_sso_that_cannot_be_renewed_is_an_error(ckptfs, cloud, models, configure, tmp_path):
    configure(SSO_SESSION)
    fields = refresh_fields(cloud)
    for wrong in ({"refreshToken": "another"}, {"registrationExpiresAt": to_text(time.time() - 5)}, {"clientSecret": ""}):
        log_in(tmp_path, "work", time.time() - 5, **fields | wrong)
        check_refused(ckptfs, models, "has expired", "what to do: aws sso login --profile me\n")
    # A token that is still valid is used.
    log_in(tmp_path, "work", time.time() + 60, **fields | {"refreshToken": "another"})
    check(ckptfs, models)
    assert cloud.issued == {"sso": 1}


def test_a_mount_renews_a_login_with_sso(mounts, cloud, models, configure, tmp_path):
    configure(SSO_SESSION)
    log_in(tmp_path, "work", time.time() - 5, **refresh_fields(cloud))
    cloud.lifetime = 3
    mount = mounts(models[1])
    assert read_through(mount, "sharded")
    time.sleep(3)
    assert read_through(mount, "pickled")
    assert cloud.issued["login"] == 1 and cloud.issued["sso"] > 1 and cloud.refused == 0
    assert SECRET not in mount.logged()


def test_a_web_identity(ckptfs, cloud, models, configure, tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text(IDENTITY_TOKEN)
    configure(f"[profile me]\nrole_arn = {ROLE}\nweb_identity_token_file = {token}\n")
    check(ckptfs, models)
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    check(ckptfs, models)
    token.write_text("another")
    check_refused(ckptfs, models, f"STS refuses the role {ROLE}: AccessDenied")
    token.unlink()
    check_refused(ckptfs, models, "cannot read the identity's token")


def test_roles_that_are_taken_one_with_another(ckptfs, cloud, models, configure, monkeypatch):
    role = f"[profile first]\nrole_arn = {ROLE}\nsource_profile = user\n[profile me]\nrole_arn = {ROLE}-2\nsource_profile = first\n"
    configure(role, keys("user", USER_KEY, USER_SECRET))
    check(ckptfs, models)
    assert cloud.issued == {"AssumeRole": 2}
    # The signature of the request counts.
    configure(role, keys("user", USER_KEY, "another"))
    check_refused(ckptfs, models, f"STS refuses the role {ROLE}: AccessDenied", "aws sts get-caller-identity")
    # At an address of its own.
    configure(role, keys("user", USER_KEY, USER_SECRET))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", cloud.address)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", cloud.address)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    check(ckptfs, models)


def test_a_role_that_needs_a_second_factor_is_left_to_the_program_of_aws(ckptfs, cloud, models, configure):
    configure(f"[profile me]\nrole_arn = {ROLE}\nsource_profile = user\nmfa_serial = arn:mfa\n", keys("user", USER_KEY, USER_SECRET))
    check_refused(ckptfs, models, 'eval "$(aws configure export-credentials --profile me --format env)"')


def test_a_command_that_prints_credentials(ckptfs, cloud, models, configure, tmp_path):
    key, secret, token, expires = cloud.issue("user")
    printed = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret, "SessionToken": token, "Expiration": to_text(expires)}
    helper = tmp_path / "a helper.py"
    helper.write_text(f"import sys\nprint({json.dumps(printed)!r} if sys.argv[1:] == ['for me'] else '')\n")
    configure(f"[profile me]\ncredential_process = {sys.executable} '{helper}' 'for me'\n")
    check(ckptfs, models)
    helper.write_text(f"import sys\nprint({SECRET!r})\nsys.exit({SECRET!r})\n")
    check_refused(ckptfs, models, "the credential_process of the profile me failed")


def test_an_expired_token_in_the_environment_is_an_error(ckptfs, cloud, models, monkeypatch):
    key, secret, token, _ = cloud.issue("user", lifetime=-1)
    for name, value in (("ACCESS_KEY_ID", key), ("SECRET_ACCESS_KEY", secret), ("SESSION_TOKEN", token)):
        monkeypatch.setenv(f"AWS_{name}", value)
    check_refused(ckptfs, models, "have expired", "log in again")


def read_through(mount, name):
    return (mount / name / "model.safetensors").read_bytes()


@pytest.fixture
def short_mount(mounts, cloud, models, configure, tmp_path, monkeypatch):
    """A mount with credentials of a role."""
    configure(f"[profile me]\nrole_arn = {ROLE}\nsource_profile = user\n", keys("user", USER_KEY, USER_SECRET))
    monkeypatch.setenv("CKPTFS_POLL_INTERVAL", "1")
    return lambda: mounts(models[1])


def test_a_mount_renews_credentials_before_they_expire(short_mount, cloud, models):
    cloud.lifetime = 3
    mount = short_mount()
    for _ in range(4):
        for name in ("sharded", "pickled"):
            assert len(read_through(mount, name)) > 1000
            drop_page_cache(mount / name / "model.safetensors")
        time.sleep(1)
    assert cloud.issued["AssumeRole"] > 2 and cloud.refused == 0


def test_a_mount_renews_credentials_that_the_store_calls_expired(short_mount, cloud, models, ckptfs, tmp_path):
    mount = short_mount()
    before = cloud.issued["AssumeRole"]
    # They were said to hold for an hour.
    cloud.expire()
    whole = read_through(mount, "sharded")
    assert whole == ckptfs.export(models[0] / "sharded", tmp_path / "out.safetensors").read_bytes()
    assert cloud.issued["AssumeRole"] == before + 1 and cloud.refused > 0


@pytest.mark.parametrize("is_renewed", [True, False])
def test_a_token_that_expires_in_the_middle_of_a_load(ckptfs, cloud, models, configure, monkeypatch, tmp_path, is_renewed):
    if is_renewed:
        configure(f"[profile me]\nrole_arn = {ROLE}\nsource_profile = user\n", keys("user", USER_KEY, USER_SECRET))
    else:
        for name, value in zip(("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"), cloud.issue("user")):
            monkeypatch.setenv(f"AWS_{name}", value)
    # The headers are read by then, but not the tensors.
    cloud.expires_after = 5
    out = tmp_path / "out.safetensors"
    done = ckptfs("export", f"{models[1]}/sharded", out)
    assert cloud.served >= cloud.expires_after and cloud.refused > 0
    if is_renewed:
        assert done.code == 0, done.stderr
        assert out.read_bytes() == ckptfs.export(models[0] / "sharded", tmp_path / "local.safetensors").read_bytes()
        assert cloud.issued["AssumeRole"] == 2
    else:
        assert done.code == FAILED and "have expired" in done.stderr and "s3://bucket/models/sharded" in done.stderr
        assert not out.exists()


def asks_metadata_server(cloud):
    return any(path.startswith("/latest/") for _, path in cloud.requests)


@pytest.fixture
def container(cloud, monkeypatch):
    """A container on a machine with a metadata server, which is not to be asked."""
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{cloud.address}/container/credentials")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", cloud.address)
    yield cloud
    assert not asks_metadata_server(cloud)


@pytest.mark.parametrize("kind", ["none", "text", "file"])
def test_the_credentials_of_a_container(ckptfs, container, models, monkeypatch, tmp_path, kind):
    if kind != "none":
        container.container_token = CONTAINER_TOKEN
        check_refused(ckptfs, models, "HTTP 401", "AWS_CONTAINER_AUTHORIZATION_TOKEN")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", CONTAINER_TOKEN)
    if kind == "file":
        # The file comes first.
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "old")
        (tmp_path / "token").write_text(f"{CONTAINER_TOKEN}\n")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    check(ckptfs, models)
    assert container.issued == {"container": 1}
    assert "this container's (AWS_CONTAINER_CREDENTIALS_FULL_URI)" in ckptfs("doctor", f"{models[1]}/sharded").stdout


def test_a_container_is_asked_past_proxies_and_redirects_are_not_followed(ckptfs, container, models, monkeypatch):
    container.container_token = CONTAINER_TOKEN
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", CONTAINER_TOKEN)
    for name in "http_proxy", "NO_PROXY", "no_proxy":
        monkeypatch.delenv(name, raising=False)
    # The store is asked by the proxy.
    monkeypatch.setenv("HTTP_PROXY", container.address)
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", "2")
    assert ckptfs("inspect", f"{models[1]}/sharded").code == FAILED
    assert container.issued == {"container": 1} and container.proxied
    assert CONTAINER_TOKEN not in str(container.proxied)
    monkeypatch.delenv("HTTP_PROXY")
    for target in f"{container.address}/latest/api/token", f"{container.address.replace('127.0.0.1', 'localhost')}/web/x":
        container.container_redirect = target
        check_refused(ckptfs, models, "gives no credentials: HTTP 302")
    assert not any(path.startswith("/web/") for _, path in container.requests)


def test_a_profile_comes_before_a_container(ckptfs, container, models, configure):
    configure("[profile me]\n", keys("me", *container.issue("user")[:3]))
    check(ckptfs, models)
    assert container.issued == {"user": 1}
    assert "the profile me of ~/.aws" in ckptfs("doctor", f"{models[1]}/sharded").stdout


def test_a_role_assumed_with_the_credentials_of_a_container(ckptfs, container, models, configure, monkeypatch):
    configure(f"[profile me]\nrole_arn = {ROLE}\ncredential_source = EcsContainer\n")
    check(ckptfs, models)
    assert container.issued == {"container": 1, "AssumeRole": 1}
    monkeypatch.delenv("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    check_refused(ckptfs, models, "this is no container of ECS or EKS")


@pytest.mark.parametrize("url", ["http://192.0.2.1/credentials", "http://169.254.169.254/latest", "file:///etc/passwd"])
def test_an_address_that_is_no_container_service_is_refused(ckptfs, container, models, monkeypatch, url):
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", CONTAINER_TOKEN)
    check_refused(ckptfs, models, "is no address of a service for a container's credentials")


def test_a_metadata_server_is_asked_only_where_that_is_allowed(ckptfs, cloud, models, monkeypatch):
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", cloud.address)
    check_refused(ckptfs, models, "no credentials for S3", "--instance-metadata")
    assert not asks_metadata_server(cloud)
    monkeypatch.setenv("CKPTFS_INSTANCE_METADATA", "1")
    check(ckptfs, models)
    assert cloud.issued == {"instance": 1}
    # Other credentials come first.
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{cloud.address}/container/credentials")
    check(ckptfs, models)
    assert cloud.issued == {"instance": 1, "container": 1}


def test_credentials_that_stay_expired_are_an_error_soon(ckptfs, cloud, models, configure):
    configure(f"[profile me]\nrole_arn = {ROLE}\nsource_profile = user\n", keys("user", USER_KEY, USER_SECRET))
    # A clock that is far behind.
    issue = cloud.issue
    cloud.issue = lambda service: (*issue(service, lifetime=-1)[:3], time.time() + 3600)
    started = time.monotonic()
    try:
        check_refused(ckptfs, models, "have expired")
    finally:
        del cloud.issue
    assert time.monotonic() - started < 10 and cloud.issued["AssumeRole"] <= 3


def test_a_mount_reads_keys_anew_when_their_file_changes(mounts, cloud, models, configure):
    configure("[profile me]\n", keys("me", *cloud.issue("user")[:3]))
    mount = mounts(models[1])
    assert read_through(mount, "sharded")
    cloud.expire()
    configure("[profile me]\n", keys("me", *cloud.issue("user")[:3]))
    time.sleep(1.1)
    assert read_through(mount, "pickled")


KINDS = {
    "role": f"role_arn = {ROLE}\nsource_profile = user\n",
    "identity": f"role_arn = {ROLE}\nweb_identity_token_file = TOKEN\n",
    "sso": "sso_start_url = x\nsso_region = us-east-1\nsso_account_id = 123\nsso_role_name = Reader\n",
    "process": "credential_process = cat PRINTED\n",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_of_a_profile_is_shown_nowhere(mounts, cloud, models, configure, tmp_path, monkeypatch, kind):
    key, secret, token, _ = cloud.issue("user")
    (tmp_path / "token").write_text(IDENTITY_TOKEN)
    printed = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret, "SessionToken": token}
    (tmp_path / "printed").write_text(json.dumps(printed))
    log_in(tmp_path, "x", time.time() + 600)
    profile = KINDS[kind].replace("TOKEN", str(tmp_path / "token")).replace("PRINTED", str(tmp_path / "printed"))
    configure(f"[profile me]\n{profile}", keys("user", USER_KEY, USER_SECRET))
    monkeypatch.setenv("RUST_LOG", "trace")
    mount = mounts(models[1], "-vvv")
    assert read_through(mount, "sharded")
    # Every way of renewal fails from now on.
    cloud.expire()
    cloud.issue = lambda service: ("key", secret, token, time.time() + 60)
    (tmp_path / "printed").write_text(f"{SECRET} is not printed")
    try:
        with pytest.raises(OSError):
            read_through(mount, "pickled")
    finally:
        del cloud.issue
    texts = [mount.logged(), json.dumps(mount.stats()), open("/proc/mounts").read(), open(f"/proc/{mount.pid}/cmdline").read()]
    for command in (["status"], ["status", "--json"]):
        done = subprocess.run([find_binary(), *command], capture_output=True, text=True, timeout=60)
        texts += [done.stdout, done.stderr]
    assert "TRACE" in texts[0] and "credentials" in texts[0]
    assert not any(word in text for text in texts for word in (SECRET, "AWS4-HMAC"))


def drop_page_cache(path):
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_the_server_of_these_tests_knows_a_signature(store_cloud):
    class Request:
        command, path = "GET", "/test.txt"
        # The example of AWS's documents.
        headers = {
            "Authorization": "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
            "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
            "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
            "host": "examplebucket.s3.amazonaws.com", "range": "bytes=0-9", "x-amz-date": "20130524T000000Z",
            "x-amz-content-sha256": hashlib.sha256(b"").hexdigest(),
        }  # fmt: skip

    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    assert clouds.is_signed_with(Request, b"", secret)
    assert not clouds.is_signed_with(Request, b"", "another")
