// What is selected, as a form. Numbers in the units that people read; an empty field means that the values differ.

const GBIT = 1e9 / 8, GIB = 2 ** 30, GIGA = 1e9, TERA = 1e12;
const GPU_FIELDS = [
  ["send_bandwidth", "Send, Gb/s", GBIT, false], ["receive_bandwidth", "Receive, Gb/s", GBIT, false],
  ["memory", "Memory, GiB", GIB, false], ["memory_bandwidth", "Memory, GB/s", GIGA, false],
  ["flops_fp16", "16-bit, TFLOP/s", TERA, false], ["flops_fp32", "32-bit, TFLOP/s", TERA, false],
  ["flops_fp8", "8-bit, TFLOP/s", TERA, true],
];

function html(name, properties = {}, children = []) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-")) made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

function labelled(title, control) {
  return html("label", {}, [html("span", { textContent: title }), control]);
}

// values: in SI units, of everything selected; commit gets the new value in SI units (null: emptied where that is allowed).
function numberField(title, values, unit, { zero = false, empty = false }, commit) {
  const same = values.every((value) => value === values[0]);
  const shown = same && values[0] !== null && values[0] !== undefined ? String(Number((values[0] / unit).toPrecision(6))) : "";
  const input = html("input", { type: "number", min: "0", step: "any", value: shown, placeholder: same ? "" : "mixed" });
  input.addEventListener("change", () => {
    if (input.value === "") {
      if (empty) commit(null);
      else input.value = shown;
      return;
    }
    const value = Number(input.value);
    const wrong = !Number.isFinite(value) || value < 0 || (value === 0 && !zero);
    input.setCustomValidity(wrong ? "a number above 0" : "");
    if (wrong) input.reportValidity();
    else commit(value * unit);
  });
  return labelled(title, input);
}

function button(title, act, label = null) {
  const made = html("button", { type: "button", textContent: title });
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

// Fills `panel` for the board's selection; `change` runs an edit and draws again.
function inspect(panel, board, types, change) {
  const gpus = board.selectedGpus, nodes = board.selectedNodes;
  const links = board.drawing.nodes.filter((node) => board.selected.has(`link ${node.id}`));
  const parts = [];
  if (gpus.length) parts.push(...gpuForm(board, gpus, types, change));
  if (nodes.length) parts.push(...nodeForm(board, nodes, change));
  if (links.length) parts.push(...linkForm(board, links, change));
  if (board.selected.has("fabric")) parts.push(...fabricForm(board, change));
  if (gpus.length || nodes.length) parts.push(moreForm(board, nodes.length ? "node" : "GPU", change));
  if (!parts.length)
    parts.push(html("p", {
      textContent: "Select a GPU, a node, a link or the fabric to edit it. Shift or Ctrl selects several; " +
        "Shift and drag selects an area.",
    }));
  panel.replaceChildren(...parts);
}

function gpuForm(board, gpus, types, change) {
  const ids = gpus.map((gpu) => gpu.id);
  const names = [...new Set([...Object.keys(types), ...gpus.map((gpu) => gpu.type)])];
  const kinds = new Set(gpus.map((gpu) => gpu.type));
  const type = html("select", {}, [
    ...(kinds.size > 1 ? [html("option", { textContent: "mixed", value: "" })] : []),
    ...names.map((name) => html("option", { textContent: name, value: name })),
  ]);
  type.value = kinds.size === 1 ? gpus[0].type : "";
  type.addEventListener("change", () => {
    if (type.value && types[type.value]) change(() => board.setGpus(ids, types[type.value].gpu));
  });
  const home = new Set(gpus.map((gpu) => board.nodeOf(gpu.id).id));
  const node = html("select", {}, [
    ...(home.size > 1 ? [html("option", { textContent: "several", value: "" })] : []),
    ...board.drawing.nodes.map((one) => html("option", { textContent: one.name, value: one.id })),
    html("option", { textContent: "a new node", value: "new" }),
  ]);
  node.value = home.size === 1 ? [...home][0] : "";
  node.addEventListener("change", () => change(() => board.move(ids, node.value)));
  return [
    html("h4", { textContent: gpus.length > 1 ? `${gpus.length} GPUs` : `GPU ${board.gpus.indexOf(gpus[0])}` }),
    labelled("Type", type), labelled("In node", node),
    ...GPU_FIELDS.map(([field, title, unit, zero]) =>
      numberField(title, gpus.map((gpu) => gpu[field]), unit, { zero }, (value) =>
        change(() => board.setGpus(ids, { [field]: value })))),
  ];
}

function nodeForm(board, nodes, change) {
  const ids = nodes.map((node) => node.id);
  const name = html("input", { type: "text", maxLength: 60, value: nodes[0].name });
  name.addEventListener("change", () => {
    if (name.value.trim()) change(() => board.setNodes(ids, { name: name.value.trim() }));
    else name.value = nodes[0].name;
  });
  return [
    html("h4", { textContent: nodes.length > 1 ? `${nodes.length} nodes` : "Node" }),
    ...(nodes.length === 1 ? [labelled("Name", name)] : []),
    numberField("Links inside, GB/s a GPU", nodes.map((node) => node.link_bandwidth ?? null), GIGA, { empty: true },
      (value) => change(() => board.setNodes(ids, { link_bandwidth: value }))),
    numberField("Start-up inside, µs", nodes.map((node) => node.link_latency ?? 0), 1e-6, { zero: true },
      (value) => change(() => board.setNodes(ids, { link_latency: value }))),
  ];
}

function linkForm(board, nodes, change) {
  const gpus = nodes.flatMap((node) => node.gpus);
  const ids = gpus.map((gpu) => gpu.id);
  const title = nodes.length > 1 ? `Links of ${nodes.length} nodes to the fabric` : `Links of ${nodes[0].name} to the fabric`;
  return [
    html("h4", { textContent: title }),
    ...GPU_FIELDS.slice(0, 2).map(([field, name, unit]) =>
      numberField(`${name} a GPU`, gpus.map((gpu) => gpu[field]), unit, {}, (value) =>
        change(() => board.setGpus(ids, { [field]: value })))),
  ];
}

function fabricForm(board, change) {
  const name = html("input", { type: "text", maxLength: 80, value: board.drawing.name });
  name.addEventListener("change", () => {
    if (name.value.trim()) change(() => board.edit((drawing) => { drawing.name = name.value.trim(); }));
    else name.value = board.drawing.name;
  });
  return [
    html("h4", { textContent: "Cluster and fabric" }), labelled("Name of the cluster", name),
    numberField("Start-up of a send, µs", [board.drawing.latency ?? 0], 1e-6, { zero: true }, (value) =>
      change(() => board.edit((drawing) => { drawing.latency = value; }))),
  ];
}

function moreForm(board, what, change) {
  const count = html("input", { type: "number", min: "1", max: "256", step: "1", value: "1", "aria-label": `How many more ${what}s` });
  return html("div", { className: "more" }, [
    count,
    button(`more ${what}s like this`, () => {
      const wanted = Math.round(Number(count.value));
      if (wanted >= 1 && wanted <= 256) change(() => board.duplicate(wanted));
    }),
    button("Remove", () => change(() => board.remove())),
  ]);
}
