// The addresses of a person's last sessions, the newest first, in their browser's storage for the studio.
const KEY = "switchyard-sessions", MOST = 6;

export default function ({ data, setStateValue }) {
  const key = `${KEY}-${data.person}`;
  let kept = [];
  try {
    kept = JSON.parse(localStorage.getItem(key) ?? "[]").filter((token) => typeof token === "string");
  } catch {
    // Somebody else's text there: begin anew.
  }
  if (data.token) localStorage.setItem(key, JSON.stringify([data.token, ...kept.filter((token) => token !== data.token)].slice(0, MOST)));
  else if (kept.length) setStateValue("tokens", kept.slice(0, MOST));
}
