// The name that a person typed, in their browser's storage for the studio.
const KEY = "switchyard-own-name";

export default function ({ data, setStateValue }) {
  if (data.name) {
    localStorage.setItem(KEY, data.name);
    return;
  }
  const kept = localStorage.getItem(KEY);
  if (kept) setStateValue("name", kept);
}
