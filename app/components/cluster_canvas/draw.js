// The drawing as SVG. Everything lies flat in one list: boxes first, then links, then GPUs, so that nothing interactive
// contains anything interactive. Strokes keep their thickness while the view is zoomed, so that the legend holds.

const SVG = "http://www.w3.org/2000/svg";
const CELL = { width: 96, height: 58, gap: 8 };
const HEAD = 56, PAD = 10, GAP = 30, BUS = 46, ACROSS = 4;

function element(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

// Thickness of a link in pixels, logarithmic: 10 Gb/s is thin, 10 Tb/s is thick.
function thickness(bytesPerSecond) {
  const decades = Math.log10(Math.max(bytesPerSecond * 8, 1e9) / 1e10);
  return Math.min(12, Math.max(1.2, 2 + 3 * decades));
}

function bandwidthText(bytesPerSecond) {
  const bits = bytesPerSecond * 8;
  const digits = (value) => String(Number(value.toPrecision(3)));
  return bits >= 1e12 ? `${digits(bits / 1e12)} Tb/s` : bits >= 1e9 ? `${digits(bits / 1e9)} Gb/s` : `${digits(bits / 1e6)} Mb/s`;
}

const together = (gpus, field) => gpus.reduce((sum, gpu) => sum + gpu[field], 0);
const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

// Where everything goes on a board of this aspect (width / height):
// {nodes: [{id, name, x, y, width, height, gpus: [{id, name, x, y}]}], rows: [{y, x2}], width, height}.
function layOut(drawing, aspect) {
  const boxes = drawing.nodes.map((node) => {
    const columns = Math.min(ACROSS, Math.max(2, node.gpus.length)), rows = Math.ceil(node.gpus.length / columns);
    return {
      id: node.id, name: node.name, columns,
      width: 2 * PAD + columns * CELL.width + (columns - 1) * CELL.gap,
      height: HEAD + PAD + rows * CELL.height + (rows - 1) * CELL.gap,
    };
  });
  let best = { width: 0, height: 0, rows: [] }, least = Infinity;
  for (let perRow = 1; perRow <= boxes.length; perRow += 1) {
    const tried = inRows(boxes, perRow), size = Math.max(tried.width / aspect, tried.height);
    if (size < least) [best, least] = [tried, size];
  }
  boxes.forEach((box, index) => {
    Object.assign(box, best.places[index]);
    box.gpus = drawing.nodes[index].gpus.map((gpu, place) => ({
      id: gpu.id, name: gpu.type, width: CELL.width, height: CELL.height,
      x: box.x + PAD + (place % box.columns) * (CELL.width + CELL.gap),
      y: box.y + HEAD + Math.floor(place / box.columns) * (CELL.height + CELL.gap),
    }));
  });
  return { nodes: boxes, rows: best.rows, width: best.width, height: best.height };
}

function inRows(boxes, perRow) {
  const rows = [], places = [];
  let y = 0, width = 0;
  for (let first = 0; first < boxes.length; first += perRow) {
    const own = boxes.slice(first, first + perRow), height = Math.max(...own.map((box) => box.height));
    let x = GAP;
    for (const box of own) {
      places.push({ x, y });
      x += box.width + GAP;
    }
    rows.push({ y: y + height + BUS * 0.6, x2: x - GAP });
    width = Math.max(width, x - GAP);
    y += height + BUS + GAP * 0.4;
  }
  return { rows, places, width, height: y - GAP * 0.4 };
}

// Draws into `layer`. Returns the layout and the items in reading order (a node, its GPUs, its link; at last the fabric), by
// their id. overlay: as `Overlay` in Python, or null.
function draw(layer, drawing, types, overlay, aspect) {
  const layout = layOut(drawing, aspect), items = new Map();
  const boxes = [], links = [], gpus = [];
  if (!layout.nodes.length) {
    Object.assign(layout, { width: 420, height: 160 });
    layer.replaceChildren(element("text", { class: "invitation", x: 210, y: 80 }, "Drag a GPU type here, or press one to add it"));
    return { layout, items };
  }
  const rows = layout.rows, first = rows[0].y, last = rows.at(-1).y;
  boxes.push(element("line", { class: "trunk", x1: 0, x2: 0, y1: first, y2: last }));
  for (const row of rows) boxes.push(element("line", { class: "trunk", x1: 0, x2: row.x2, y1: row.y, y2: row.y }));
  let rank = 0;
  layout.nodes.forEach((box, index) => {
    const node = drawing.nodes[index];
    boxes.push(keep(nodeItem(node, box)));
    node.gpus.forEach((gpu, place) => {
      const at = box.gpus[place];
      const made = keep(gpuItem(gpu, rank, node, at, types, overlay));
      at.title = made.querySelector(".type");
      gpus.push(made);
      rank += 1;
    });
    const narrow = overlay?.bottleneck?.fabric && overlay.bottleneck.rank >= rank - node.gpus.length && overlay.bottleneck.rank < rank;
    links.push(keep(linkItem(node, box, rows.find((row) => row.y > box.y).y, narrow)));
  });
  const latency = drawing.latency ? `latency ${Number((drawing.latency * 1e6).toPrecision(3))} µs` : "no latency";
  links.push(keep(item("fabric", "fabric", `Fabric of ${drawing.name}, ${latency}`, [
    element("rect", { class: "hit", x: -14, y: first - 14, width: 28, height: last - first + 28 }),
    element("circle", { class: "knot", cx: 0, cy: first, r: 9 }),
    element("text", { class: "small", x: 14, y: first - 8 }, "fabric"),
    element("title", {}, `Fabric of ${drawing.name} · ${latency}`),
  ])));
  layer.replaceChildren(...boxes, ...links, ...gpus);
  return { layout, items };

  function keep(made) {
    items.set(made.dataset.id, made);
    return made;
  }
}

function nodeItem(node, box) {
  const inside = node.link_bandwidth ? `links ${bandwidthText(node.link_bandwidth)} per GPU` : "no links of its own";
  box.title = element("text", { class: "name", x: box.x + PAD, y: box.y + 20 });
  const parts = [
    element("rect", { class: "box", x: box.x, y: box.y, width: box.width, height: box.height, rx: 6 }),
    box.title,
    element("text", { class: "small", x: box.x + PAD, y: box.y + 37 }, inside),
    element("title", {}, `${node.name} · ${plural(node.gpus.length, "GPU")} · ${inside}`),
  ];
  if (node.link_bandwidth)
    parts.push(element("line", {
      class: "inner", x1: box.x + PAD, x2: box.x + box.width - PAD, y1: box.y + HEAD - 9, y2: box.y + HEAD - 9,
      style: `--thick: ${thickness(node.link_bandwidth)}`,
    }));
  return item(node.id, "node", `Node ${node.name}, ${plural(node.gpus.length, "GPU")}, ${inside}`, parts);
}

function linkItem(node, box, end, narrow) {
  const out = together(node.gpus, "send_bandwidth"), into = together(node.gpus, "receive_bandwidth");
  const rate = out === into ? bandwidthText(out) : `${bandwidthText(out)} out, ${bandwidthText(into)} in`;
  const x = box.x + box.width / 2, y = box.y + box.height;
  return item(`link ${node.id}`, narrow ? "link narrow" : "link", `Links of ${node.name} to the fabric, ${rate} together`, [
    element("rect", { class: "hit", x: x - 14, y, width: 28, height: end - y }),
    element("line", { class: "cable", x1: x, x2: x, y1: y, y2: end, style: `--thick: ${thickness(Math.max(out, into))}` }),
    element("text", { class: "small", x: x + 14, y: y + 18 }, rate),
    element("title", {}, `${node.name} to the fabric: ${rate} together`),
  ]);
}

function gpuItem(gpu, rank, node, { x, y }, types, overlay) {
  const laid = overlay?.gpus[rank];
  const narrow = overlay?.bottleneck?.rank === rank ? overlay.bottleneck : null;
  const parts = [
    element("rect", {
      class: "chip", x, y, width: CELL.width, height: CELL.height, rx: 4, fill: types[gpu.type]?.colour ?? "#DDDDDD",
    }),
    element("text", { class: "type", x: x + 7, y: y + 18 }),
    element("text", { class: "rank", x: x + 7, y: y + 34 }, laid ? fitted(laid.text, CELL.width - (narrow ? 28 : 12), 12) : `GPU ${rank}`),
  ];
  if (laid) {
    const width = CELL.width - 50;
    parts.push(
      element("rect", { class: "track", x: x + 7, y: y + CELL.height - 16, width, height: 8 }),
      element("rect", { class: "load", x: x + 7, y: y + CELL.height - 16, width: width * laid.share, height: 8 }),
      element("text", { class: "rank end", x: x + CELL.width - 6, y: y + CELL.height - 8 }, laid.tokens),
    );
  } else {
    const { send_bandwidth: out, receive_bandwidth: into } = gpu;
    const rate = out === into ? bandwidthText(out) : `↑${bandwidthText(out).replace(" Gb/s", "")} ↓${bandwidthText(into)}`;
    parts.push(element("text", { class: "rank", x: x + 7, y: y + 50 }, fitted(rate, CELL.width + 4, 12)));
  }
  if (narrow)
    parts.push(
      element("rect", { class: "frame", x: x - 3, y: y - 3, width: CELL.width + 6, height: CELL.height + 6, rx: 6 }),
      element("text", { class: "arrow", x: x + CELL.width - 7, y: y + 34 }, narrow.sends ? "▲" : "▼"),
    );
  const more = (laid ? `, ${laid.label}` : "") + (narrow ? `, ${narrow.text}` : "");
  parts.push(element("title", {}, `GPU ${rank} · ${gpu.type} · sends ${bandwidthText(gpu.send_bandwidth)}, ` +
    `receives ${bandwidthText(gpu.receive_bandwidth)}${more}`));
  return item(gpu.id, "gpu", `GPU ${rank}, ${gpu.type}, in ${node.name}${more}`, parts);
}

function item(id, kind, label, parts) {
  const made = element("g", {
    class: `item ${kind}`, "data-id": id, "data-kind": kind.split(" ")[0], role: "button", tabindex: "-1", "aria-label": label,
    "aria-pressed": "false",
  });
  made.append(...parts);
  return made;
}

// Links of three speeds, as thick as on the board.
function drawLegend(place) {
  for (const [bits, text] of [[1e10, "10 Gb/s"], [1e11, "100 Gb/s"], [1e12, "1 Tb/s"], [1e13, "10 Tb/s"]]) {
    const sample = element("svg", { class: "sample", width: 26, height: 14, "aria-hidden": "true" });
    sample.append(element("line", { class: "cable", x1: 0, x2: 26, y1: 7, y2: 7, style: `--thick: ${thickness(bits / 8)}` }));
    const entry = document.createElement("span");
    entry.append(sample, text);
    place.append(entry);
  }
}
