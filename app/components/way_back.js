// Where the browser was before a login, kept in its tab: a provider sends everybody back to the studio's root.
const KEY = "switchyard-way-back";

function leadsElsewhere(kept) {
  if (kept === null) return false;
  const before = new URL(kept);
  return before.origin === location.origin && (before.search !== "" || before.pathname !== location.pathname);
}

export default function ({ data, setStateValue }) {
  const kept = sessionStorage.getItem(KEY);
  if (data.leaving) {
    // After a refusal one is at the root again, and may try once more.
    if (location.search || kept === null) sessionStorage.setItem(KEY, location.href);
    return;
  }
  sessionStorage.removeItem(KEY);
  if (leadsElsewhere(kept)) location.replace(kept);
  else setStateValue("done", true);
}
