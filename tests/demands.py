"""Requests that demand a version, and what every server has to answer: one table, which the tests of each
server run.

The server serves version 2, and no other while they run. `{"x-deltasync-timeout": "0.1"}` keeps waits in vain
short.
"""

from __future__ import annotations

import dataclasses
import json

HEADER, TIMEOUT, MAX_LAG = "x-deltasync-version", "x-deltasync-timeout", "x-deltasync-max-lag"
SERVED = 2


@dataclasses.dataclass(frozen=True)
class Demand:
    """A request.

    Attributes:
        code: The status code of its reply.
        headers: In order; the content type is JSON if none is among them.
        fields: Added to the JSON body, as its text between braces.
        body: The whole body instead.
        query: Of the address.
        encoding: Of the body.
    """

    code: int
    headers: tuple[tuple[str, str], ...] = ()
    fields: str = ""
    body: bytes | None = None
    query: str = ""
    encoding: str = "utf-8"

    def data(self, body: dict[str, object]) -> bytes:
        """The body of a request whose other fields are these."""
        if self.body is not None:
            return self.body
        text = json.dumps(body)
        return (f"{text[:-1]}, {self.fields}}}" if self.fields else text).encode(self.encoding)

    def all_headers(self) -> list[tuple[str, str]]:
        named = any(name.lower() == "content-type" for name, _ in self.headers)
        return [*self.headers] if named else [("content-type", "application/json"), *self.headers]


def header(code: int, *values: str, name: str = HEADER) -> Demand:
    return Demand(code, (*((name, value) for value in values), (TIMEOUT, "0.1")))


def field(
    code: int, value: str, name: str = f'"{HEADER}"', kind: str = "application/json", **options: str
) -> Demand:
    fields = f'{name}: {value}, "{TIMEOUT}": 0.1'
    return Demand(code, (("content-type", kind),), fields, **options)


FORM = b'--b\r\nContent-Disposition: form-data; name="x-deltasync-version"\r\n\r\n2\r\n--b--\r\n'

READ = {
    "none": Demand(200),
    "exact": header(200, "2"),
    "exact, not served": header(409, "3"),
    "exact, older": header(409, "1"),
    "later": header(200, ">=1"),
    "later, not served": header(409, ">=99"),
    "latest": Demand(200, ((HEADER, ">=latest"), (TIMEOUT, "60"))),  # it asks the store
    "spaces": header(409, "  >=  99 "),
    "name in capitals": header(409, "99", name="X-DeltaSync-Version"),
    "junk": header(400, "junk"),
    "junk after >=": header(400, ">=junk"),
    "empty": header(400, ""),
    "zero": header(400, "0"),
    "negative": header(400, "-1"),
    "a fraction": header(400, "2.0"),
    "newest without >=": header(400, "latest"),
    "not ASCII": header(400, "²"),
    "a junk time": Demand(400, ((HEADER, "2"), (TIMEOUT, "soon"))),
    "a junk time alone": Demand(400, ((TIMEOUT, "soon"),)),
    "twice the same": header(200, "2", "2"),
    "the second is another": header(400, "2", ">=99"),
    "the first is another": header(400, ">=99", "2"),
    "joined by a proxy": header(400, "2, >=99"),
    "joined, the same": header(200, "2, 2"),
    "a field": field(200, "2"),
    "a field of text": field(409, '">=99"'),
    "a field, not served": field(409, "99"),
    "a junk field": field(400, '"junk"'),
    "a field that is true": field(400, "true"),
    "a field that is a list": field(400, "[2]"),
    "a field that is null": field(200, "null"),
    "a field in capitals": field(409, "99", '"X-DeltaSync-Version"'),
    "an escaped field": field(409, "99", r'"x-\u0064eltasync-version"'),
    "an escaped dash": field(409, "99", r'"x\u002ddeltasync\u002dversion"'),
    "an escaped value": field(409, r'"\u003e=99"'),
    "a field, then another": field(409, f'2, "{HEADER}": 99'),
    "another, then a field": field(200, f'99, "{HEADER}": 2'),
    "beside a number that JSON has not": field(409, '99, "other": NaN'),
    "header and field agree": Demand(200, ((HEADER, "2"),), f'"{HEADER}": 2'),
    "header and field differ": Demand(400, ((HEADER, "2"),), f'"{HEADER}": 99'),
    "named in a prompt": Demand(200, (), f'"stop": ["{HEADER}"]'),
    "a type with a charset": field(409, "99", kind="application/json; charset=utf-8"),
    "a type in capitals": field(409, "99", kind="Application/JSON"),
    "a type with a suffix": field(409, "99", kind="application/vnd.api+json"),
    "another type": field(409, "99", kind="text/plain"),
    "a junk lag": header(400, "junk", name=MAX_LAG),
    "a negative lag": header(400, "-1", name=MAX_LAG),
    "an empty lag": header(400, "", name=MAX_LAG),
    "two lags": header(400, "1", "2", name=MAX_LAG),
    "a lag that is true": field(400, "true", f'"{MAX_LAG}"'),
    "a lag in the address": Demand(400, query=f"{MAX_LAG}=1"),
    "a lag in a form": Demand(
        400,
        (("content-type", "application/x-www-form-urlencoded"),),
        body=b"prompt=a&x%2ddeltasync-max-lag=1",
    ),
    "in the address": Demand(400, query=f"{HEADER}=99"),
    "escaped in the address": Demand(400, query="x%2DDeltasync%2Dversion=99"),
    "in a form": Demand(400, (("content-type", "multipart/form-data; boundary=b"),), body=FORM),
    "in an encoded form": Demand(
        400,
        (("content-type", "application/x-www-form-urlencoded"),),
        body=b"prompt=a&x%2ddeltasync-version=99",
    ),
}
"""By what it tests."""
