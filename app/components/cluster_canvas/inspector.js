// The selection as a form. Numbers in the units that people read; an empty field means that the values differ. The fields
// stay the same elements as long as the same things are selected, so that typing in them is not interrupted.

const GBIT = 1e9 / 8, GIB = 2 ** 30, GIGA = 1e9, TERA = 1e12;
const GPU_FIELDS = [
  ["send_bandwidth", "Send, Gb/s", GBIT, false], ["receive_bandwidth", "Receive, Gb/s", GBIT, false],
  ["memory", "Memory, GiB", GIB, false], ["memory_bandwidth", "Memory bandwidth, GB/s", GIGA, false],
  ["flops_fp16", "16-bit, TFLOP/s", TERA, false], ["flops_fp32", "32-bit, TFLOP/s", TERA, false],
  ["flops_fp8", "8-bit, TFLOP/s", TERA, true], // 0: the type has no 8-bit units
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

class Inspector {
  // studio: gives board, types, overlay and say, and takes edits by change.
  constructor(panel, studio) {
    this.panel = panel;
    this.studio = studio;
    this.shown = null;
  }

  get board() {
    return this.studio.board;
  }

  // Shows the selection as it is now.
  show() {
    const selection = [...this.board.selected].sort().join();
    if (selection !== this.shown) {
      this.shown = selection;
      this.updates = [];
      this.panel.replaceChildren(...this.parts());
    }
    for (const update of this.updates) update();
  }

  focus() {
    this.panel.querySelector("input, select, button")?.focus();
  }

  parts() {
    const { board } = this, parts = [];
    if (board.selectedGpus.length) parts.push(...this.gpuForm());
    if (board.selectedNodes.length) parts.push(...this.nodeForm());
    if (board.selectedLinks.length) parts.push(...this.linkForm());
    if (board.selected.has("fabric")) parts.push(...this.fabricForm());
    if (board.selectedGpus.length || board.selectedNodes.length) parts.push(this.moreForm());
    if (board.selectedGpus.length) parts.push(this.planText());
    if (parts.length) return parts;
    return [
      html("h3", { textContent: "Nothing selected" }),
      html("p", {
        textContent: "Click a GPU, a node, a link or the fabric's hub to edit it. Shift-click selects several, Shift-" +
          "drag an area.",
      }),
    ];
  }

  // A text that follows the drawing.
  following(name, text) {
    const made = html(name);
    this.updates.push(() => { made.textContent = text(); });
    return made;
  }

  gpuForm() {
    const { studio, board } = this, gpus = () => board.selectedGpus, ids = () => gpus().map((gpu) => gpu.id);
    const type = this.choice("Type", "mixed", () => [...new Set(gpus().map((gpu) => gpu.type))], () => {
      const names = new Set([...Object.keys(studio.types), ...gpus().map((gpu) => gpu.type)]);
      return [...names].map((name) => [name, name]);
    }, (name) => {
      // The ports are the machine's: another GPU in the same place has the same ones, as in the table.
      const { send_bandwidth, receive_bandwidth, ...rest } = studio.types[name]?.gpu ?? {};
      return board.setGpus(ids(), rest);
    });
    const home = () => [...new Set(gpus().map((gpu) => board.nodeOf(gpu.id).id))];
    const node = this.choice("In node", "several", home, () => [
      ...board.drawing.nodes.map((one) => [one.id, one.name]), ["new", "a new node"],
    ], (id) => board.move(ids(), id === "new" ? null : id));
    return [
      this.following("h3", () => (gpus().length === 1 ? `GPU ${board.gpus.indexOf(gpus()[0])}` : `${gpus().length} GPUs`)),
      type, node,
      ...GPU_FIELDS.map(([field, title, unit, zero]) =>
        this.number(title, () => gpus().map((gpu) => gpu[field] || null), unit, { zero, empty: zero }, (value) =>
          board.setGpus(ids(), { [field]: value ?? 0 }))),
    ];
  }

  nodeForm() {
    const { board } = this, nodes = () => board.selectedNodes, ids = () => nodes().map((node) => node.id);
    return [
      this.following("h3", () => (nodes().length === 1 ? "Node" : `${nodes().length} nodes`)),
      ...(nodes().length === 1
        ? [this.text("Name", 60, () => nodes()[0].name, (name) => this.rename(nodes()[0], name))]
        : []),
      this.following("p", () => {
        const gpus = nodes().flatMap((node) => node.gpus);
        const memory = Number((together(gpus, "memory") / GIB).toPrecision(4)).toLocaleString("en");
        return `${plural(gpus.length, "GPU")}, ${memory} GiB, ${bandwidthText(together(gpus, "send_bandwidth"))} to the fabric`;
      }),
      this.number("Links inside, GB/s per GPU", () => nodes().map((node) => node.link_bandwidth ?? null), GIGA, { empty: true },
        (value) => board.setNodes(ids(), { link_bandwidth: value })),
      this.number("Latency inside, µs", () => nodes().map((node) => node.link_latency ?? 0), 1e-6, { zero: true },
        (value) => board.setNodes(ids(), { link_latency: value })),
    ];
  }

  rename(node, name) {
    const changed = this.board.setNodes([node.id], { name });
    const given = this.board.nodeOf(node.id).name;
    if (given !== name) this.studio.say(`Another node is called ${name}: this one is now ${given}.`);
    return changed;
  }

  linkForm() {
    const { board } = this, nodes = () => board.selectedLinks, gpus = () => nodes().flatMap((node) => node.gpus);
    return [
      this.following("h3", () =>
        nodes().length === 1 ? `Links of ${nodes()[0].name} to the fabric` : `Links of ${nodes().length} nodes to the fabric`),
      ...GPU_FIELDS.slice(0, 2).map(([field, name, unit]) =>
        this.number(`${name} per GPU`, () => gpus().map((gpu) => gpu[field]), unit, {}, (value) =>
          board.setGpus(gpus().map((gpu) => gpu.id), { [field]: value }))),
    ];
  }

  fabricForm() {
    const { board } = this;
    return [
      html("h3", { textContent: "Cluster and fabric" }),
      this.text("Name", 80, () => board.drawing.name, (name) => board.edit((drawing) => { drawing.name = name; })),
      this.number("Latency per send, µs", () => [board.drawing.latency ?? 0], 1e-6, { zero: true }, (value) =>
        board.edit((drawing) => { drawing.latency = value; })),
    ];
  }

  moreForm() {
    const { studio, board } = this, what = board.selectedNodes.length ? "node" : "GPU";
    const count = html("input", {
      type: "number", min: "1", max: "256", step: "1", value: "1", "aria-label": `How many more ${what}s`,
    });
    const more = () => {
      const wanted = Number(count.value);
      this.forgive();
      if (!Number.isInteger(wanted) || wanted < 1 || wanted > 256) this.complain(count, "Copies come in whole numbers from 1 to 256.");
      else studio.duplicate(wanted);
    };
    const act = (title, does) => {
      const made = html("button", { type: "button", textContent: title });
      made.addEventListener("click", does);
      return made;
    };
    count.addEventListener("keydown", (event) => { if (event.key === "Enter") more(); });
    return html("div", { className: "more" }, [count, act(`more ${what}s like this`, more), act("Remove", () => studio.removeSelected())]);
  }

  // Experts and tokens on the GPU under the plan that is laid over the drawing.
  planText() {
    const { studio, board } = this, made = html("div", { className: "plan" });
    this.updates.push(() => {
      const [gpu] = board.selectedGpus, laid = board.selectedGpus.length === 1 && studio.shownOverlay?.gpus[board.gpus.indexOf(gpu)];
      made.replaceChildren(...(laid ? [html("h3", { textContent: "The open plan here" }),
        ...[laid.label, ...laid.layers].map((textContent) => html("p", { textContent }))] : []));
    });
    return made;
  }

  // The controls. `read` gives the values of all that is selected, in SI units; `edit` changes the board and returns true if it did.

  number(title, read, unit, { zero = false, empty = false }, edit) {
    const input = html("input", { type: "number", min: "0", step: "any" });
    const fill = () => {
      const values = read(), same = values.every((value) => value === values[0]);
      const known = same && values[0] !== null && values[0] !== undefined;
      input.value = known ? String(Number((values[0] / unit).toPrecision(6))) : "";
      input.placeholder = same ? (empty ? "none" : "") : "mixed";
    };
    this.control(input, fill, () => {
      const value = Number((Number(input.value) * unit).toPrecision(12));
      if (input.value === "" && empty && !input.validity.badInput) return edit(null);
      if (input.value === "" || !Number.isFinite(value) || value < 0 || (value === 0 && !zero))
        return this.complain(input, `${title}: give a number ${zero ? "from 0 up" : "above 0"}. The old one stays.`);
      return edit(value);
    });
    return labelled(title, input);
  }

  text(title, maxLength, read, edit) {
    const input = html("input", { type: "text", maxLength });
    this.control(input, () => { input.value = read(); }, () => {
      const name = input.value.trim();
      return name ? edit(name) : this.complain(input, "Give a name. The old one stays.");
    });
    return labelled(title, input);
  }

  choice(title, several, read, options, edit) {
    const select = html("select");
    const fill = () => {
      const values = read(), shown = [...(values.length > 1 ? [["", several]] : []), ...options()];
      select.replaceChildren(...shown.map(([value, textContent]) => html("option", { value, textContent })));
      select.value = values.length > 1 ? "" : values[0];
    };
    this.control(select, fill, () => select.value && edit(select.value));
    return labelled(title, select);
  }

  // Why a typed value does not count, below its control. Answers that nothing changed.
  complain(control, text) {
    control.closest("label, .more").after(html("p", { className: "wrong", role: "alert", textContent: text }));
    return false;
  }

  forgive() {
    for (const one of this.panel.querySelectorAll(".wrong")) one.remove();
  }

  // Text stays while it is typed; then the field shows the value that counts.
  control(input, fill, commit) {
    let typing = false;
    input.addEventListener("input", () => { typing = true; });
    input.addEventListener("change", () => {
      typing = false;
      this.forgive();
      this.studio.change(commit);
      fill();
    });
    input.addEventListener("blur", () => { typing = false; });
    this.updates.push(() => { if (!typing) fill(); });
  }
}
