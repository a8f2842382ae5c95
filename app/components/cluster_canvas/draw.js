// The drawing as SVG. Everything lies flat in one list: boxes first, then links, then GPUs, so that nothing interactive
// contains anything interactive.

const SVG = "http://www.w3.org/2000/svg";
const CELL = { width: 78, height: 56, gap: 8 };
const HEAD = 30, PAD = 10, GAP = 34, BUS = 46;

function element(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

// Thickness of a link, logarithmic: 10 Gb/s is thin, 10 Tb/s is thick.
function thickness(bytesPerSecond) {
  const decades = Math.log10(Math.max(bytesPerSecond * 8, 1e9) / 1e10);
  return Math.min(14, Math.max(1.5, 3 + 3 * decades));
}

function bandwidthText(bytesPerSecond) {
  const bits = bytesPerSecond * 8;
  const digits = (value) => String(Number(value.toPrecision(3)));
  return bits >= 1e12 ? `${digits(bits / 1e12)} Tb/s` : bits >= 1e9 ? `${digits(bits / 1e9)} Gb/s` : `${digits(bits / 1e6)} Mb/s`;
}

// Where everything goes: {nodes: [{id, x, y, width, height, gpus: [{id, x, y}]}], rows: [{y, x1, x2}], width, height}.
function layOut(drawing) {
  const boxes = drawing.nodes.map((node) => {
    const columns = Math.min(4, Math.max(2, node.gpus.length));
    const rows = Math.ceil(node.gpus.length / columns);
    return {
      id: node.id, columns,
      width: 2 * PAD + columns * CELL.width + (columns - 1) * CELL.gap,
      height: HEAD + PAD + rows * CELL.height + (rows - 1) * CELL.gap,
    };
  });
  const perRow = Math.max(1, Math.ceil(Math.sqrt(boxes.length * 0.9)));
  const rows = [];
  let y = 0, widest = 0;
  for (let first = 0; first < boxes.length; first += perRow) {
    const own = boxes.slice(first, first + perRow);
    const height = Math.max(...own.map((box) => box.height));
    let x = GAP;
    for (const box of own) {
      Object.assign(box, { x, y });
      x += box.width + GAP;
    }
    rows.push({ y: y + height + BUS * 0.6, x1: 0, x2: x - GAP });
    widest = Math.max(widest, x);
    y += height + BUS + GAP * 0.6;
  }
  const place = new Map(drawing.nodes.map((node) => [node.id, node]));
  for (const box of boxes) {
    box.gpus = place.get(box.id).gpus.map((gpu, index) => ({
      id: gpu.id,
      x: box.x + PAD + (index % box.columns) * (CELL.width + CELL.gap),
      y: box.y + HEAD + Math.floor(index / box.columns) * (CELL.height + CELL.gap),
    }));
  }
  return { nodes: boxes, rows, width: widest, height: y };
}

// Draws into `layer` and returns the layout. overlay: {gpus: [{text, share}], bottleneck: {rank, direction, text}} or null.
function draw(layer, drawing, types, overlay) {
  const layout = layOut(drawing);
  const boxes = [], links = [], gpus = [];
  if (!layout.nodes.length) {
    layer.replaceChildren(element("text", { class: "name", x: 40, y: 90 }, "Drag a GPU type here, or press one to add it."));
    return layout;
  }
  const trunk = layout.rows;
  boxes.push(element("line", { class: "fabric", x1: 0, x2: 0, y1: trunk[0].y, y2: trunk[trunk.length - 1].y }));
  for (const row of trunk) boxes.push(element("line", { class: "fabric", x1: row.x1, x2: row.x2, y1: row.y, y2: row.y }));
  const latency = drawing.latency ? `, start-up ${Number((drawing.latency * 1e6).toPrecision(3))} µs` : "";
  links.push(item("fabric", "fabric", `Fabric of ${drawing.name}${latency}`, [
    element("rect", { class: "hit", x: -14, y: trunk[0].y - 14, width: 28, height: trunk[trunk.length - 1].y - trunk[0].y + 28 }),
    element("circle", { class: "knot", cx: 0, cy: trunk[0].y, r: 9 }),
    element("text", { class: "small", x: 14, y: trunk[0].y - 9 }, "fabric"),
  ]));
  let rank = 0;
  layout.nodes.forEach((box, index) => {
    const node = drawing.nodes[index];
    const row = trunk.find((one) => one.y > box.y);
    const count = node.gpus.length;
    const inner = node.link_bandwidth ? `, links ${bandwidthText(node.link_bandwidth)} a GPU` : ", no links of its own";
    boxes.push(item(box.id, "node", `Node ${node.name}, ${count} GPU${count > 1 ? "s" : ""}${inner}`, [
      element("rect", { class: "box", x: box.x, y: box.y, width: box.width, height: box.height, rx: 6 }),
      element("text", { class: "name", x: box.x + PAD, y: box.y + 20 }, fitted(node.name, box.width - 2 * PAD - 92)),
      element("text", { class: "small end", x: box.x + box.width - PAD, y: box.y + 20 },
        node.link_bandwidth ? bandwidthText(node.link_bandwidth) : "no links"),
    ]));
    if (node.link_bandwidth)
      boxes.push(element("line", {
        class: "inner", x1: box.x + PAD, x2: box.x + box.width - PAD, y1: box.y + HEAD - 4, y2: box.y + HEAD - 4,
        "stroke-width": thickness(node.link_bandwidth) / 2,
      }));
    const sends = node.gpus.reduce((sum, gpu) => sum + gpu.send_bandwidth, 0);
    const middle = box.x + box.width / 2;
    links.push(item(`link ${box.id}`, "link", `Links of ${node.name} to the fabric, ${bandwidthText(sends)} together`, [
      element("rect", { class: "hit", x: middle - 12, y: box.y + box.height, width: 24, height: row.y - box.y - box.height }),
      element("line", {
        class: "cable", x1: middle, x2: middle, y1: box.y + box.height, y2: row.y, "stroke-width": thickness(sends),
      }),
      element("text", { class: "small", x: middle + 12, y: box.y + box.height + 18 }, bandwidthText(sends)),
    ]));
    node.gpus.forEach((gpu, place) => {
      const { x, y } = box.gpus[place];
      gpus.push(gpuItem(gpu, rank, node, x, y, types, overlay));
      rank += 1;
    });
  });
  layer.replaceChildren(...boxes, ...links, ...gpus);
  return layout;
}

function gpuItem(gpu, rank, node, x, y, types, overlay) {
  const laid = overlay?.gpus[rank];
  const narrow = overlay?.bottleneck?.rank === rank ? overlay.bottleneck : null;
  const parts = [
    element("rect", {
      class: "chip", x, y, width: CELL.width, height: CELL.height, rx: 4, fill: types[gpu.type]?.colour ?? "#DDDDDD",
    }),
    element("text", { class: "type", x: x + 7, y: y + 18 }, fitted(gpu.type, CELL.width - 12)),
    element("text", { class: "rank", x: x + 7, y: y + 33 }, laid ? laid.text : `GPU ${rank}`),
  ];
  if (laid) {
    parts.push(element("rect", { class: "track", x: x + 7, y: y + CELL.height - 14, width: CELL.width - 14, height: 6 }));
    parts.push(element("rect", {
      class: "load", x: x + 7, y: y + CELL.height - 14, width: (CELL.width - 14) * Math.min(1, laid.share), height: 6,
    }));
  } else {
    parts.push(element("text", { class: "rank", x: x + 7, y: y + 48 }, bandwidthText(gpu.send_bandwidth)));
  }
  if (narrow) {
    parts.push(element("rect", {
      class: "narrow", x: x - 2, y: y - 2, width: CELL.width + 4, height: CELL.height + 4, rx: 6,
    }));
    parts.push(element("text", { class: "narrow-text", x: x + CELL.width / 2, y: y - 6 }, narrow.text));
  }
  const more = (laid ? `, ${laid.label}` : "") + (narrow ? `, bottleneck: ${narrow.text}` : "");
  const made = item(gpu.id, "gpu", `GPU ${rank}, ${gpu.type}, in ${node.name}${more}`, parts);
  made.append(element("title", {}, `GPU ${rank} · ${gpu.type} · sends ${bandwidthText(gpu.send_bandwidth)}, ` +
    `receives ${bandwidthText(gpu.receive_bandwidth)}${more}`));
  return made;
}

function item(id, kind, label, parts) {
  const made = element("g", {
    class: `item ${kind}`, "data-id": id, "data-kind": kind, role: "button", tabindex: "-1", "aria-label": label,
    "aria-pressed": "false",
  });
  made.append(...parts);
  return made;
}

// Text cut to about `width` pixels; a hover shows the rest.
function fitted(text, width) {
  const most = Math.max(3, Math.floor(width / 7));
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
