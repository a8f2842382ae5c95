"""A real login: required, refused, by address, expired, forged and ended; and the link that was asked for survives it."""

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import flask
import oidc_provider_mock
import pytest
from playwright.sync_api import Page, expect
from streamlit.web.server.starlette.starlette_app_utils import create_signed_value, decode_signed_value
from werkzeug.serving import make_server

from app.visitor import people, roles
from engine.store import team
from engine.store.database import Database
from tests import everything
from tests.browser.access import faults_in_either_theme
from tests.browser.conftest import free_port, settle
from tests.cases.teams import plan_of

pytestmark = pytest.mark.filterwarnings("ignore:get_jwt_config:DeprecationWarning")

SECRET, COOKIE = "a long and random text of a test", "_streamlit_user"
ANA, EVE = "ana@example.org", "eve@example.org"
TEAM = {ANA: "operate", "default": "view"}
STYLE = re.compile(rb"<link\b.*?/>", re.DOTALL)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a provider that believes everybody; its pages do without the style that they fetch from outside."""
    monkeypatch.setenv("AUTHLIB_INSECURE_TRANSPORT", "1")
    claims = [oidc_provider_mock.User(sub=email, claims={"email": email, "name": email[:3].title()}) for email in (ANA, EVE)]
    app = oidc_provider_mock.app(user_claims=claims)

    @app.after_request
    def plain(response: flask.Response) -> flask.Response:
        if response.mimetype == "text/html":
            response.set_data(STYLE.sub(b"", response.get_data()))
        return response

    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture
def studio(provider: str, start_studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a studio that wants everybody to log in there."""
    port = free_port()
    (tmp_path / "secrets.toml").write_text(
        f"""[auth]
redirect_uri = "http://127.0.0.1:{port}/oauth2callback"
cookie_secret = "{SECRET}"
client_id = "switchyard"
client_secret = "not a secret here"
server_metadata_url = "{provider}/.well-known/openid-configuration"
"""
    )
    monkeypatch.setenv("STREAMLIT_SECRETS_FILES", str(tmp_path / "secrets.toml"))
    monkeypatch.setenv(people.SWITCH, "required")
    monkeypatch.setenv(roles.SETTING, json.dumps(TEAM))
    return start_studio(port=port)


def ask(page: Page) -> None:
    """Go from the studio's login to the provider."""
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Authorize Client")).to_be_visible()


def choose(page: Page, button: str) -> None:
    """Press a button of the provider, which has nothing that comes to rest."""
    page.get_by_role("button", name=button, exact=True).press("Enter")


def corner(page: Page, name: str) -> None:
    """Open the menu next to one's name."""
    page.get_by_role("button", name=re.compile(name)).click()


def with_claims(page: Page, studio: str, secret: str, **claims: object) -> None:
    """Replace the cookie of the login by one that says something else, signed with a secret."""
    kept = next(cookie for cookie in page.context.cookies(studio) if cookie["name"] == COOKIE)
    said = json.loads(decode_signed_value(SECRET, COOKIE, kept["value"].strip('"').encode("latin-1")))
    value = create_signed_value(secret, COOKIE, json.dumps(said | claims)).decode()
    page.context.add_cookies([{"name": COOKIE, "value": value, "url": studio}])
    page.reload()
    settle(page)


def test_the_whole_way_of_a_login(page: Page, studio: str, data_folder: Path) -> None:
    data_folder.mkdir(exist_ok=True)
    db = Database(f"sqlite:///{data_folder / 'switchyard.db'}")
    saved = team.save_plan(db, team.add_workspace(db, "Autumn", "Ana").id, plan_of("the plan of the link"), "Ana")
    db.close()
    login = page.get_by_text("Log in to see this studio")
    plan = page.get_by_role("heading", name="the plan of the link")

    page.goto(f"{studio}/review?plan={saved.plan}")
    expect(login).to_be_visible()
    assert plan.count() == 0 and page.get_by_role("link", name="Workload").count() == 0
    ask(page)
    choose(page, "Deny")
    expect(login).to_be_visible()

    ask(page)
    choose(page, EVE)
    expect(plan).to_be_visible()
    assert f"plan={saved.plan}" in page.url and "/review" in page.url
    corner(page, EVE)
    expect(page.get_by_text("You may look at plans, reviews and reports.")).to_be_visible()
    expect(page.get_by_role("link", name="Administration")).to_have_count(0)
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", name="End Session")).to_be_visible()  # the provider asks whether one means it
    page.get_by_role("button").press("Enter")
    expect(login).to_be_visible()

    ask(page)
    choose(page, ANA)
    expect(page.get_by_role("heading", name="Workload", exact=True)).to_be_visible()
    corner(page, ANA)
    page.get_by_role("link", name="Administration").click()
    expect(page.get_by_role("heading", name="Administration")).to_be_visible()
    settle(page)
    expect(page.get_by_text("Healthy: ")).to_be_visible()
    if everything.WANTED:
        assert not (found := faults_in_either_theme(page)), "\n".join(found)

    with_claims(page, studio, SECRET, iat=time.time() - 13 * 3600)
    expect(page.get_by_text("Your login has expired")).to_be_visible()
    with_claims(page, studio, "another secret that is long enough", email=ANA)
    expect(login).to_be_visible()
