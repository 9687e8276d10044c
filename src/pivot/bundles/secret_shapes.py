"""Secrets that show by their own shape, and lines that hold none. Travels to hosts with `pivot.bundles.redact`:
standard library only, Python 3.9.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_NAMES = r"(?:api[_-]?key|access[_-]?key|secret[_-]?key|auth[_-]?token|access[_-]?token|token|password|passwd|secret)"
# the end of a group, user:, then a password, which may hold a piece that is masked; bounded, since logs hold anything
_LOGIN = r"[^\s/:\"'<>=]{1,64}:)(?:<\w{1,32}>|[^\s/\"'<>\\]){1,256}"
# what says that a word is no plain word: a digit, or a capital behind a small letter
_MIXED = r"(?=[\w.~+/-]*(?:\d|(?-i:[a-z][A-Z])|[+/=_]))"


def _shape(hints: str, pattern: str, replacement: str = "{}") -> tuple[tuple[str, ...], str, str]:
    """Texts of which one has to be there (in a word, if it has no blank) before the pattern is compiled and tried; what
    stands there instead then.
    """
    return tuple(hints.split("|")), pattern, replacement


SHAPES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    _shape(
        "KEY-----|BLOCK-----",
        r"(-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)(?:.|\n)*?(-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
        r"\g<1>{}\g<2>",
    ),
    # the end of one whose beginning was cut off
    _shape(
        "-----END",
        r"(?:^(?:\S+ \S+ \S+: )?[A-Za-z0-9+/=]{16,}\r?\n)+(?=(?:\S+ \S+ \S+: )?-----END [A-Z ]*PRIVATE KEY)",
        "{}\n",
    ),
    _shape("hf_|api_org_", r"\b(?:hf_(?:oauth_|jwt_)?|api_org_)[A-Za-z0-9]{16,}"),
    _shape("sk-|rk-|pk-", r"\b(?:sk|rk|pk)-[A-Za-z0-9_-]{20,}"),
    _shape("_live_|_test_", r"\b(?:sk|rk|pk|whsec)_(?:live|test)_[A-Za-z0-9]{16,}"),
    _shape(
        "gho_|ghp_|ghr_|ghs_|ghu_|github_pat_|glpat-|xox",
        r"\b(?:gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,})",
    ),
    _shape(
        "AIza|nvapi-|npm_|pypi-|hvs.|hvb.|AGE-SECRET",
        r"\b(?:AIza[\w-]{30,}|nvapi-[\w-]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{20,}|hv[sb]\.[\w-]{20,}"
        r"|AGE-SECRET-KEY-1[A-Z0-9]{20,})",
    ),
    _shape(
        "gsk_|dckr_pat_|glrt-|xapp-|tskey-|ya29.|GOCSPX-",
        r"\b(?:gsk_|dckr_pat_|glrt-|xapp-|tskey-|ya29\.|GOCSPX-)[\w.-]{16,}",
    ),
    _shape(
        "r8_|fw_|xai-|pplx-|dapi|glsa_|glc_|dop_v1_|sntrys_|sntryu_|figd_|lin_api_|ntn_|PMAK-|gldt-|glptt-|glcbt-",
        r"\b(?:(?:r8|fw|glc|ntn|figd|lin_api|dop_v1|glsa|sntry[su])_|(?:xai|pplx|PMAK|gldt|glptt|glcbt)-|dapi(?=[0-9a-f]{32}))"
        r"(?=[\w+/=.-]*\d)[\w+/=.-]{20,}",
    ),
    _shape("SG.", r"\bSG\.[\w-]{16,}\.[\w-]{16,}"),
    _shape(":AA", r"\b\d{8,10}:AA[\w-]{30,}"),
    _shape("hooks.slack", r"(hooks\.slack\.com/services/)[\w/]+", r"\g<1>{}"),
    _shape("AKIA|ASIA", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    _shape("eyJ", r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"),
    _shape(
        "PVE",
        r"(PVEAPIToken[=:] ?)[^\s\"'\\<]+|(PVEAuthCookie=)[^\s\"'\\;<]+"
        r"|\bPVE[A-Z]*:(?:[^\s:\"'<]+:)?[0-9A-F]{8}::[^\s\"'\\,;<]+",
        r"\g<1>\g<2>{}",
    ),
    _shape(
        "earer|EARER",
        r"(?i)(?<=\bbearer )(?![\"'<])(?![a-z]+(?:[\s.,;)\]]|$))[^\s\"'\\,]{6,}",
    ),
    _shape("asic", rf"(?<=\b[Bb]asic ){_MIXED}[A-Za-z0-9+/]{{8,}}={{0,2}}"),
    # a password may hold an @ (the last one before the path is the host's), and a piece that is masked already
    _shape("://", r"(://[^\s/:@\"'<>]*:)(?:<\w+>|[^\s/\"'<>])+(?=@)", r"\g<1>{}"),
    _shape("://", r"(://)(?=[^\s/:@\"'<>]*\d)[^\s/:@\"'<>]{16,}(?=@)", r"\g<1>{}"),
    # a name alone in a web address that is no plain word is mostly a token
    _shape("http|HTTP", rf"(?i)(\bhttps?://)(?!<){_MIXED}[^\s/:@\"'<>]{{8,}}(?=@)", r"\g<1>{}"),
    # a proxy without a scheme: what stands behind its name, and apart from a name only what has a host with a port
    _shape("roxy|ROXY", rf"(?i)(proxy[\\\"']*\s*[=:]\s*[\\\"']*{_LOGIN}(?=@(?!sha256:))", r"\g<1>{}"),
    _shape("roxy|ROXY", rf"(?i)(proxy[\\\"']*\s+[\\\"']*{_LOGIN}(?=@[\w.-]+:\d{{1,5}}\b)", r"\g<1>{}"),
    _shape("ig=|ature=", r"(?i)([?&](?:x-\w+-)?sig(?:nature)?=)[^\s&\"'<>]+", r"\g<1>{}"),
    _shape(
        "%3D|%3d|%3A|%3a",
        rf"(?i)({_NAMES}(?:%22)?(?:%20|\+)*%3[AD](?:%20|\+)*(?:%22)?)(?!%20|\+)(?:(?!%22|%26|%2C)[^\s\"'<>&])+",
        r"\g<1>{}",
    ),
    _shape("&quot;", rf"(?i)({_NAMES}&quot;\s*[:=]\s*&quot;)(?:(?!&quot;)[^\n])+", r"\g<1>{}"),
    _shape("</", rf"(?i)(<\w*{_NAMES}\w*>)[^<\n]+(?=</)", r"\g<1>{}"),
    _shape('"auth"', r"(\"auth\"\s*:\s*\")[A-Za-z0-9+/=]{8,}", r"\g<1>{}"),
    _shape("curl", r"(\bcurl\b[^\n]*?\s(?:-u|--user)[ =]?[\"']?[^\s:\"']+:)[^\s\"']+", r"\g<1>{}"),
    _shape("curl", r"(\bcurl\b[^\n]*?\s(?:-b|--cookie)[ =]?(?:\"|(')|))(?!<)(?(2)[^'\n]+|[^\s\"']+)", r"\g<1>{}"),
    _shape("sshpass|mysql", r"(\bsshpass\s+-p\s*[\"']?|\bmysql\w*\b[^\n]*?\s-p[\"']?)[^\s\"']+", r"\g<1>{}"),
    _shape("login", r"(\blogin\s+\S+\s+password\s+)[^\s<]\S*|(\bwandb login )(?![-<])\S+", r"\g<1>\g<2>{}"),
    _shape("$6$|$5$|$1$|$y$|$2a$|$2b$|$2y$|$apr1$", r"\$(?:[156y]|apr1|2[aby])\$[^\s:\"'<]{12,}"),
    _shape("setenv", rf"(?i)(\bsetenv\s+\w{{0,60}}{_NAMES}\w*\s+[\"']?)(?![<\"'])[^\s\"';]+", r"\g<1>{}"),
    # a variable's name, and its value beside it
    _shape(
        "value",
        rf"(?i)(\bname[\"']?\s*[:=]\s*[\"']?\w{{0,60}}{_NAMES}[\"']?\s*,?\s*[\"']?value[\"']?\s*[:=]\s*(?:([\"'])|))(?!<)"
        r"(?(2)[^\"'\n]+|[^\s\"',}}]+)",
        r"\g<1>{}",
    ),
    _shape("full-tokenid", r"(\bfull-tokenid\b(?:.|\n){0,400}?\bvalue\b\W{1,40})[0-9a-f-]{36}", r"\g<1>{}"),
    # a name in words, and a value that is no word
    _shape(
        "pi key|PI key|PI Key|assword|assphrase",
        rf"(?i)(\b(?:api key|password|passphrase)(?: (?:is|provided))?:? (?:is )?){_MIXED}[\w.~+/=-]{{8,}}",
        r"\g<1>{}",
    ),
)

# how SGLang logs requests and answers (--log-requests): as text, and as JSON, also inside JSON
REQUEST = re.compile(
    r"(\b(?:Receive|Finish)(?: OpenAI)?: obj=\w*|\"event\\*\": *\\*\"request\.[\w.]+\\*\",)(?!\w| ?<text)[^\n]*"
)

# Lines of which serving logs are full, to the last letter of what a secret could hide in: they are passed over, several
# at once, because looking for every shape in them would take most of the time
_WHEN = r"(?:[\w:.+-]+ [\w.-]+ [\w.@-]+\[\d+\]: )?(?:\[[\d :.,A-Z_-]+\] )?"
_BATCH = r"(?:Decode|Prefill) batch(?: \[\d+\])?(?:, #?[a-zA-Z][a-zA-Z. ()/-]{0,40}: (?:[\d.]+|True|False))+"
_ACCESS = r"INFO: +[\d.]+:\d+ - \"[A-Z]+ /[a-z0-9_/]{0,60} HTTP/1\.\d\" \d{3} [A-Za-z ]+"
_CHANNEL = (
    r"[\w.-]+:\d+:\d+ \[\d+\] NCCL INFO Channel \d+/\d+ : \d+\[\d+\] -> \d+\[\d+\](?: \[\w+\])? via [A-Za-z0-9/]+"
)
_RUN = re.compile(rf"(?:{_WHEN}(?:{_BATCH}|{_ACCESS}|{_CHANNEL})\r?\n)+")
_IN_RUNS = (
    " batch, #",
    " batch [",
    ' HTTP/1.1" 200 OK',
    " NCCL INFO Channel ",
)  # one of these stands in each of their lines


def ordinary(text: str) -> Iterator[tuple[int, int]]:
    """Where the lines begin and end in which no secret has room, several of them at once."""
    begin = 0
    ahead = dict.fromkeys(_IN_RUNS, -1)
    while True:
        for hint, place in ahead.items():
            if place < begin:
                found = text.find(hint, begin)
                ahead[hint] = found if found >= 0 else len(text)
        first = min(ahead.values())
        if first >= len(text):
            return
        begin = max(begin, text.rfind("\n", begin, first) + 1)
        run = _RUN.match(text, begin)
        if run:
            yield run.span()
            begin = run.end()
        else:
            begin = (text.find("\n", first) + 1) or len(text)
