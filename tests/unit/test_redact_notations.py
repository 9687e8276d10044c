"""Masking as somebody sees it who looks for what is left: every notation that a secret may stand in, and what no secret is.

All secrets here hold the letters Zq9, in some case.
"""

# ruff: noqa: E501 - texts as they are logged; the secrets are made up

import base64
import json
import urllib.parse

import pytest

from pivot.bundles.redact import MASK, Redactor

b64 = base64.b64encode(b"user:Zq9-made-up-pass").decode()
LEAKS = {
    "multiline yaml |": "password: |\n  Zq9-made-up\n  two\nx: 1",
    "multiline yaml >-": "api_key: >-\n    Zq9-made-up\nport: 1",
    "yaml folded plain": "password:\n  Zq9-made-up\nport: 1",
    "yaml list": "passwords:\n  - Zq9-made-up\n",
    "continued line": "ExecStart=/opt/py -m x \\\n    --api-key \\\n    Zq9-made-up \\\n    --port 3",
    "continued line, nothing between": "x --api-key\\\n  Zq9-made-up",
    "continued line of dos": "x --api-key \\\r\n    'Zq9-made-up' \\\r\n",
    "continued behind =": "x --api-key=\\\n    Zq9-made-up --port 3",
    "continued behind a comment": "ExecStart=/opt/py -m x \\\n  # from the vault\n; and so on\n    --api-key \\\n#x\n Zq9-made-up",
    "proxy without a scheme": "http_proxy=user:Zq9-made-up@proxy:3128",
    "proxy without a scheme, quoted": "HTTPS_PROXY: 'user:Zq9-made-up@proxy:3128'",
    "proxy in JSON in JSON": '{"line": "{\\"http_proxy\\": \\"user:Zq9-made-up@proxy:3128\\"}"}',
    "proxy as an option": "curl --proxy user:Zq9-made-up@proxy:3128 http://x",
    "proxy of apt": 'Acquire::http::Proxy "user:Zq9-made-up@proxy:3128";',
    "proxy of a user with a domain": "http_proxy=user@corp:Zq9-made-up@proxy:3128",
    "proxy with a piece that is a token": "http_proxy=user:hf_AbCdEfGhIjKlMnOpQrSt@Zq9-made-up@proxy:3128",
    "web address in capitals": "HTTPS://Zq9-made-up@host/x.git",
    "option that is continued at once, with a comment": "x --api-key\\\n# comment\n  Zq9-made-up",
    "short token in a web address": "https://Zq9-made-up@host/x.git",
    "continued environment": "Environment=HF_TOKEN=Zq9-made-up \\\n   OPENAI_API_KEY=Zq9-made-up",
    "url with @ in the password": "HTTPS_PROXY=http://user:p@Zq9-made-up@proxy:3128",
    "url with a token and an @ in the password": "http://user:hf_AbCdEfGhIjKlMnOpQrSt@Zq9-made-up@proxy:3128",
    "url query token": "GET /x?token=Zq9-made-up&y=1 HTTP/1.1",
    "url query api_key": "GET /x?api_key=Zq9-made-up HTTP/1.1",
    "url query access_token": "https://h/x?access_token=Zq9-made-up&b=2",
    "urlencoded pair": "body=api_key%3DZq9-made-up%26x%3D1",
    "urlencoded json": urllib.parse.quote('{"api_key": "Zq9-made-up"}'),
    "json escaped": json.dumps({"a": json.dumps({"b": json.dumps({"password": "Zq9-made-up"})})}),
    "basic": f"Authorization: Basic {b64}",
    "basic lower": f"authorization: basic {b64}",
    "basic url": "curl -u user:Zq9-made-up http://h",
    "curl --user": "curl --user admin:Zq9-made-up http://h",
    "env nul": "PATH=/bin\0HF_TOKEN=Zq9-made-up\0HOME=/root\0",
    "env nul 2": "A=b\0DB_PASSWORD=Zq9-made-up with blanks\0HOME=/root\0",
    "hf url": "https://user:hf_AbCdEfGhIjKlMnOpQrSt@huggingface.co/x",
    "hf url no user": "https://hf_AbCdEfGhIjKlMnOpQrSt@huggingface.co/x",
    "hf query": "https://huggingface.co/x?token=hf_AbCdEfGhIjKlMnOpQrSt",
    "token user url": "https://oauth2:Zq9-made-up@gitlab/x.git",
    "token only url": "https://Zq9-made-up-0123456789abcdef@github.com/x.git",
    "pve api token header": "Authorization: PVEAPIToken=root@pam!t=aaaaaaaa-bbbb-cccc-dddd-Zq9-made-up",
    "pve token value colon": "PVEAPIToken: root@pam!t=Zq9-made-up",
    "csrf": "CSRFPreventionToken: 66AABBCC:Zq9-made-up",
    "csrf json": '{"data":{"CSRFPreventionToken":"66AABBCC:Zq9-made-up","ticket":"PVE:root@pam:66AABBCC::Zq9madeup=="}}',
    "ticket json": '{"ticket":"Zq9-made-up"}',
    "ticket urlenc": "PVEAuthCookie=PVE%3Aroot%40pam%3A66AABBCC%3A%3AZq9-made-up%3D%3D",
    "vncticket": "PVEVNC:66AABBCC::Zq9-made-up==",
    "cookie": "Cookie: a=1; session=Zq9-made-up; b=2",
    "set-cookie": "set-cookie: sid=Zq9-made-up; HttpOnly",
    "cookie json": '{"headers": {"cookie": "sid=Zq9-made-up"}}',
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJaX30.Zq9-made-up-sig",
    "jwt empty sig": "x eyJhbGciOiJub25lIn0.eyJzdWIiOiJaX3E5bWFkZXVwIn0. y",
    "aws secret": "aws_secret_access_key = Zq9-made-up/x",
    "aws session": "AWS_SESSION_TOKEN=Zq9-made-up",
    "aws presigned": "https://b.s3.amazonaws.com/x?X-Amz-Credential=AKIA/2026&X-Amz-Signature=Zq9madeup0123456789&X-Amz-Security-Token=Zq9-made-up",
    "gcs presigned": "https://storage/x?GoogleAccessId=a&Expires=1&Signature=Zq9-made-up%3D",
    "azure sas": "https://a.blob.core.windows.net/c/x?sv=2022&sig=Zq9-made-up%3D&se=1",
    "cloudfront": "https://cdn-lfs.hf.co/x?Policy=abc&Signature=Zq9-made-up~&Key-Pair-Id=K1",
    "ssh private": "-----BEGIN OPENSSH PRIVATE KEY-----\nZq9-made-up\n-----END OPENSSH PRIVATE KEY-----",
    "ssh private one line": "-----BEGIN OPENSSH PRIVATE KEY-----\\nZq9-made-up\\n-----END OPENSSH PRIVATE KEY-----\\n",
    "pem journal": "2026-11-29T10:00:00+0000 h x[1]: -----BEGIN RSA PRIVATE KEY-----\n2026-11-29T10:00:00+0000 h x[1]: Zq9-made-up\n2026-11-29T10:00:00+0000 h x[1]: -----END RSA PRIVATE KEY-----",
    "pem cut": "-----BEGIN EC PRIVATE KEY-----\nZq9-made-up\n",
    "pem tail": "Zq9MadeUpZq9MadeUp0123==\nZq9MadeUpZq9MadeUp0123==\n-----END PRIVATE KEY-----\n",
    "server_info": '{"api_key":"Zq9-made-up","admin_api_key":"Zq9-made-up2"}',
    "python repr dict": "{'api_key': 'Zq9-made-up', 'x': 1}",
    "python repr obj": "Config(api_key=SecretStr('Zq9-made-up'))",
    "bytes header": "(b'x-api-key', b'Zq9-made-up')",
    "list headers": "[['Authorization', 'Bearer Zq9-made-up']]",
    "tuple headers": "headers=[('authorization', 'Bearer Zq9-made-up')]",
    "argv": "['python', '--api-key', 'Zq9-made-up']",
    "argv=": "['python', '--api-key=Zq9-made-up']",
    "argv docker": "docker run -e HF_TOKEN=Zq9-made-up x",
    "argv -p": "mysql -pZq9-made-up",
    "sshpass": "sshpass -p Zq9-made-up ssh x",
    "sshpass -p quoted": "sshpass -p'Zq9-made-up' ssh x",
    "netrc": "machine h login u password Zq9-made-up",
    "pgpass env": "PGPASSWORD=Zq9-made-up",
    "connection string": "Server=h;User Id=u;Password=Zq9-made-up;Database=d",
    "dsn sentry": "SENTRY_DSN=https://Zq9-made-up@o1.ingest.sentry.io/1",
    "sentry url": "dsn https://0123456789abcdef0123456789abcdef@o1.ingest.sentry.io/1",
    "xml": "<password>Zq9-made-up</password>",
    "xml attr": '<user password="Zq9-made-up"/>',
    "toml": 'api_key = "Zq9-made-up"',
    "ini": "password = Zq9-made-up",
    "camel": '{"apiKey": "Zq9-made-up", "accessToken": "Zq9-made-up3"}',
    "secretKey": '{"secretKey":"Zq9-made-up"}',
    "clientSecret": "clientSecret=Zq9-made-up",
    "wandb": "wandb login Zq9-made-up-key",
    "npm": "//registry/:_authToken=Zq9-made-up",
    "docker auth": '{"auths":{"h":{"auth":"WnE5LW1hZGUtdXA="}}}'.replace("WnE5LW1hZGUtdXA=", "Zq9madeupauth0123="),
    "openai": "sk-proj-Zq9madeup0123456789abcdef",
    "anthropic": "sk-ant-api03-Zq9madeup0123456789abcdef",
    "slack hook": "https://hooks.slack.com/services/T000/B000/Zq9madeup0123456789",
    "google": "AIzaSyZq9madeup0123456789abcdefghijklmno",
    "stripe": "sk_live_Zq9madeup0123456789abcd",
    "ngc": "nvapi-Zq9madeup0123456789abcdef",
    "npm tok": "npm_Zq9madeup0123456789abcdefghijklmnop",
    "pypi": "pypi-AgEIcHlwaS5vcmcZq9madeup0123456789",
    "vault": "hvs.Zq9madeup0123456789abcdef",
    "age": "AGE-SECRET-KEY-1ZQ9MADEUP0123456789ABCDEFGHIJK",
    "ansi name": "\x1b[1mapi_key\x1b[0m=\x1b[32mZq9-made-up\x1b[0m",
    "ansi json": '"\x1b[34mapi_key\x1b[0m": "\x1b[32mZq9-made-up\x1b[0m"',
    "spaced": "api key: Zq9-made-up",
    "API Key is": "using API key Zq9-made-up",
    "password is": "password is Zq9-made-up",
    "shadow": "root:$6$Zq9madeup$0123456789abcdefghij/:19000:0:99999:7:::",
    "x-auth-token": "X-Auth-Token: Zq9-made-up",
    "x-hf-token": "x-hf-authorization: Bearer Zq9-made-up",
    "proxy env": "https_proxy=http://u:Zq9-made-up@p:1",
    "tab separated": "api_key\tZq9-made-up",
    "curl header eq": "--header=Authorization:Zq9-made-up",
    "grpc metadata": "metadata: authorization=Bearer Zq9-made-up",
    "token header": "Authorization: Token Zq9-made-up",
    "json number": '{"password": 12345678}',
    "digest": 'Authorization: Digest username="u", response="Zq9-made-up"',
    "private_key json": '{"private_key": "-----BEGIN PRIVATE KEY-----\\nZq9-made-up\\n-----END PRIVATE KEY-----\\n"}',
    "lxc env": "lxc.environment: HF_TOKEN=Zq9-made-up",
    "cloud-init": "cipassword: Zq9-made-up",
    "env colon export": 'declare -x WANDB_API_KEY="Zq9-made-up"',
    "set dump": "HF_TOKEN='Zq9-made-up'",
    "systemd show env": "Environment=HF_HOME=/x HF_TOKEN=Zq9-made-up OMP=1",
    "systemd show env quoted": 'Environment="HF_TOKEN=Zq9-made-up x" OMP=1',
    "ExecStart show": "ExecStart={ path=/x ; argv[]=/x --api-key Zq9-made-up --port 1 ; ignore_errors=no }",
    "html entity": "&quot;api_key&quot;: &quot;Zq9-made-up&quot;",
    "windows": "password: Zq9-made-up\r\nport: 1\r\n",
    "arrow": "password -> Zq9-made-up",
    "walrus": "password := Zq9-made-up",
    "hf oauth": "hf_oauth_Zq9MadeUpZq9MadeUp",
    "hf organisation": "api_org_Zq9MadeUpZq9MadeUpZq9",
    "yaml list at the same depth": "api_keys:\n- Zq9-made-up\n- Zq9-two\nport: 1",
    "json list of lines": '{"api_keys": [\n  "Zq9-made-up",\n  "Zq9-two"\n], "x": 1}',
    "variable set in python": "os.environ['HF_TOKEN'] = 'Zq9-made-up'",
    "variable set in python, close": 'os.environ["WANDB_API_KEY"]="Zq9-made-up"',
    "item of a mapping": "('HF_TOKEN', 'Zq9-made-up')",
    "kubernetes": "- name: HF_TOKEN\n  value: Zq9-made-up\n",
    "name and value": '{"name": "HF_TOKEN", "value": "Zq9 made up"}',
    "cookie of curl": "curl -b 'session=Zq9-made-up; a=Zq9' https://h",
    "cookie of curl, bare": "curl --cookie sid=Zq9-made-up https://h",
    "ansible's": "ansible_become_pass: Zq9-made-up",
    "ansible's by ssh": "ansible_ssh_pass='Zq9-made-up'",
    "pass": "user=u pass=Zq9-made-up",
    "pgp": "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nZq9lQOY\n-----END PGP PRIVATE KEY BLOCK-----",
    "wireguard": "PresharedKey = Zq9madeup0123456789abcdefghijklmnopqrstuvw=",
    "azure": "AccountName=x;AccountKey=Zq9AbCdEfGhIj==;EndpointSuffix=y",
    "azure header": "Ocp-Apim-Subscription-Key: Zq9-made-up",
    "signing key": "signing_key: Zq9-made-up",
    "groq": "gsk_Zq9AbCdEfGhIjKlMnOpQrStUvWx",
    "docker hub": "dckr_pat_Zq9AbCdEfGhIjKlMnOpQrStUv",
    "gitlab runner": "glrt-Zq9madeup0123456789",
    "slack app": "xapp-1-A0Zq9-1234567890123-abcdefZq9",
    "google oauth": "ya29.Zq9AbCdEfGhIjKlMnOpQrStUvWx0123456",
    "openai says": "Incorrect API key provided: Zq9-made-up. You can find yours",
    "htpasswd": "u:$apr1$Zq9abcde$0123456789abcdefghijkl",
    "jq in colours": '\x1b[32m"api_key"\x1b[39m: \x1b[33m"Zq9-made-up"\x1b[39m',
    "csh": "setenv HF_TOKEN Zq9-made-up",
    "csh, quoted": "setenv WANDB_API_KEY 'Zq9-made-up'; setenv OMP_NUM_THREADS 1",
    "replicate": "r8_Zq9AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "fireworks": "fw_Zq9AbCdEfGhIjKlMnOpQrSt",
    "grafana": "glsa_Zq9AbCdEfGhIjKlMnOpQrStUvWxYz012_3a4b5c6d",
    "sentry token": "sntrys_Zq9AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "gitlab deploy": "gldt-Zq9AbCdEfGhIjKlMnOp1",
    "xai": "xai-Zq9AbCdEfGhIjKlMnOpQrStUv",
    "perplexity": "pplx-Zq9AbCdEfGhIjKlMnOpQrStUv",
    "databricks": "token of the job dapi0123456789abcdef0123456789abcdef",
    "grafana cloud": "glc_Zq9AbCdEfGhIjKlMnOpQrStUv==",
    "digitalocean": "dop_v1_zq90123456789abcdef0123456789abcdef",
    "figma": "figd_Zq9AbCdEfGhIjKlMnOp-QrStUv",
    "linear": "lin_api_Zq9AbCdEfGhIjKlMnOpQrStUv",
    "notion": "ntn_Zq9AbCdEfGhIjKlMnOpQrStUv",
    "postman": "PMAK-Zq9AbCdEfGhIjKlMnOp-QrStUv",
    "gitlab trigger": "glptt-Zq9AbCdEfGhIjKlMnOp1",
    "gitlab job": "glcbt-Zq9AbCdEfGhIjKlMnOp1",
    "sendgrid": "SG.Zq9AbCdEfGhIjKlMnOpQrS.Zq9AbCdEfGhIjKlMnOpQrStUvWxYz0123456789abcd",
    "telegram": "bot 123456789:AAZq9AbCdEfGhIjKlMnOpQrStUvWxYz0123 answers",
    "hash-rocket": ":password=>'Zq9-made-up'",
}

KEPT = [
    "first_pass: full, pass: 3, forward_pass=extend",
    "PASS: test_that_it_starts",
    "bypass_cache=yes",
    "api_key_env: HF_TOKEN",
    "missing ['api_key', 'port']",
    "name: tokenizer, value: kimi",
    '{"name": "num_tokens", "value": 812}',
    "draft_tokens[2] = 4",
    "hf_quant_config.json",
    "hf_overrides={}",
    "gsk_x, glrt-, ya29.",
    "setenv PATH /usr/bin",
    "setenv(3) sets tokens",
    "fw_bw_time_in_milliseconds_of_the_step, r8_g8_b8, glc_x, xai-org",
    "dapi.read, SG.a.b, 12345678:AA",
    "sort keys:\n- name\n- size\nport: 1",
    "revision 54383e83fa343a1331754112fb9e3410c55efa2f",
    "sha256: 7b3bda11e04f4297bb7ed6c2e966304588de89934380ecaa28df0f91895a3327",
    '{"sha256": "7b3bda11e04f4297bb7ed6c2e966304588de89934380ecaa28df0f91895a3327", "revision": "54383e83"}',
    "commit f5049709b3239cd754f09f779bd85644b01ac4a2 by x",
    "git@github.com:sgl-project/sglang.git",
    "root@10.0.0.2:/var/tmp/x",
    "GPU-5a3b2c1d-1111-2222-3333-444455556666",
    "commId 0x7f3a2b1c4d5e6f70 - Init COMPLETE",
    "00000000:01:00.0",
    "uuid=0b7f4a53-6b2f-4c0e-9a40-2b1b8c1f7e1e",
    "tokenizer_path='/m'",
    "key: value",
    "sort_key=lambda",
    "keyboard=us",
    "cache key: abc123",
    "token usage: 0.01, #token: 812",
    "eos_token_id=163586",
    "keys: [1, 2]",
    "layer key_value=3",
    "kv_cache key dtype",
    "passed=31",
    "bypass: on",
    "compass: north",
    "author: Pivot",
    "authority: pve",
    "api_key_file=/x",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGNotSecretPublicKey root@pve1",
    "num_key_value_heads=8",
    "qk_rope_head_dim=64",
    "key_dim=128",
    "--host-key /etc/x",
    "ssh_host_ed25519_key.pub",
    "token: 812",
    "max_new_tokens: 5",
    "INVOCATION_ID=7c2f0a0d1b2c3d4e5f60718293a4b5c6",
    "http://10.0.0.1:30000/health",
    "file:///models/x@main",
    "https://huggingface.co/moonshotai/Kimi-K2.5/resolve/abcdef0123456789/model.safetensors",
    "numpy==2.4.0 --hash=sha256:7b3bda11e04f4297bb7ed6c2e966304588de89934380ecaa28df0f91895a3327",
    "unexpected key: layers.0.weight",
    "KeyError: 'kimi_k2'",
    "missing keys ['lm_head.weight']",
    "x --api-key \\\n --port 3",
    "x --api-key=\\\n  --port 3",
    "http://h:3000/x?m=a@b",
    "signature=inspect",
    "policy=lpm",
    "sig=15",
    "signal=9",
    "PASS 31",
    "cookie jar",
    "basic authentication is off",
    "Basic block of size 8",
    "bearer of news",
    "pid=12 token=3",
    "password authentication failed",
    "watermark_key=15485863",
    "Secret sharing",
    "secretary: x",
    "ticket 123 closed",
    "session=3",
    "user: root",
    "auth=none",
    "schedule_policy='lpm', token_mode=real",
    "https://docs@example.org/x",
    "https://some-name@example.org/x",
    "http_proxy=proxy.example:3128 x@y",
    "e@example.org wrote",
    "Bearer authentication",
    "custom_all_reduce key",
    "tp_rank=0 key=3",
]


@pytest.mark.parametrize("notation", LEAKS)
def test_nothing_of_it_is_left(notation: str) -> None:
    text = LEAKS[notation]
    masked = Redactor().text(f"before\n{text}\nafter\n")
    assert MASK in masked
    assert "zq9" not in masked.lower()
    assert b64 not in masked
    assert masked.startswith("before\n")
    assert masked.endswith("\nafter\n") or notation == "pem cut"
    assert Redactor().text(masked) == masked


@pytest.mark.parametrize("text", KEPT)
def test_what_is_none_stays(text: str) -> None:
    assert Redactor().text(text) == text


PVE_TOKEN = "01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(
    "text",
    [
        f'{{"full-tokenid":"root@pam!ci","info":{{"privsep":"0"}},"value":"{PVE_TOKEN}"}}',
        f"│ full-tokenid │ root@pam!ci │\n├──────────────┼─────────────┤\n│ value        │ {PVE_TOKEN} │",
    ],
)
def test_the_only_look_at_a_new_token_of_proxmox(text: str) -> None:
    assert Redactor().text(text) == text.replace(PVE_TOKEN, MASK)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("x --api-key \\\n    Zq9 \\\n --port 3\n", f"x --api-key \\\n    {MASK} \\\n --port 3\n"),
        ("api-keys:\n  - Zq9\n  - Zq9b\nport: 3\n", f"api-keys:\n  - {MASK}\nport: 3\n"),
        ("http://u:p@h/x?m=a@b", f"http://u:{MASK}@h/x?m=a@b"),
        ("redis://:p@q@h:1/0 x@y", f"redis://:{MASK}@h:1/0 x@y"),
    ],
)
def test_what_stands_around_it_stays(text: str, masked: str) -> None:
    assert Redactor().text(text) == masked


def test_a_value_beside_its_name_in_data() -> None:
    told = [{"name": "HF_TOKEN", "value": "x" * 9}, {"name": "HF_HOME", "value": "/x"}, {"name": 3, "value": 4}]
    assert Redactor().data(told) == [{"name": "HF_TOKEN", "value": MASK}, *told[1:]]


def test_lines_that_are_passed_over_are_those_without_a_place_for_a_secret() -> None:
    batch = "[2026-11-29 10:00:00 ATTN_CP0 TP0] Decode batch [4040], #running-req: 1, #token: 812, cuda graph: True, gen throughput (token/s): 31.20, #queue-req: 0\n"
    access = 'INFO:     127.0.0.1:5123 - "GET /v1/models HTTP/1.1" 200 OK\n'
    asked = 'INFO:     127.0.0.1:5123 - "GET /v1/models?api_key=Zq9-made-up HTTP/1.1" 200 OK\n'
    odd = "[2026-11-29 10:00:00] Decode batch, #running-req: 1, password: Zq9-made-up\n"
    known = Redactor(["812"]).text(batch)
    assert f"#token: {MASK}," in known
    assert Redactor().text(batch + access + batch) == batch + access + batch
    for line in (asked, odd):
        masked = Redactor().text(batch + line + access)
        assert "Zq9" not in masked
        assert masked.startswith(batch)
        assert masked.endswith(access)
