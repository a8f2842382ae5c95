// Scrolls to its own place once a turn. Parts above may still grow while it is drawn, so it looks again a little later.
let last = null;

export default function ({ data, parentElement }) {
  if (data.turn === last) return;
  last = data.turn;
  const place = parentElement.host ?? parentElement;
  const scroll = () => place.scrollIntoView({ block: "start" });
  scroll();
  for (const wait of [500, 1500]) setTimeout(scroll, wait);
}
