// The board on the page: selection, messages, keys, and the exchange with Python. Called again at every rerun, so
// everything that has to stay lives in `Studio`, which is kept on the element.

class Studio {
  // board: the one of an earlier visit to the page, with its history, or a new one.
  constructor(root, data, board) {
    this.root = root;
    this.find = (part) => root.querySelector(`[data-part="${part}"]`);
    this.layer = this.find("layer");
    this.board = board ?? new Board(data.cluster);
    this.board.session ??= data.session;
    this.view = new View(this.find("board"));
    this.inspector = new Inspector(this.find("inspector"), this);
    this.serial = data.answered;
    this.focused = null;
    drawLegend(this.find("legend"));
    this.listen();
    listenToPointer(this);
    this.resized = new ResizeObserver(() => this.view.resize());
  }

  // Python's latest answer. An answer to an edit that was not the last one is out of date.
  take(data, send) {
    this.send = send;
    this.fillPalette(data.types);
    this.types = data.types;
    this.board.links = Object.fromEntries(Object.entries(data.types).map(([name, type]) => [name, type.links]));
    this.board.presets = data.presets;
    if (data.session !== this.board.session) {
      this.board.session = data.session;
      this.serial = data.answered;
      this.board.begin(data.cluster);
      this.say("");
    } else if (data.answered >= this.serial) {
      this.serial = data.answered;
      if (data.refused) this.board.refuse(data.cluster);
      else if (this.board.replace(data.cluster)) this.say("Drawing updated from the preset, file or table.");
    }
    this.overlay = data.overlay;
    if (this.picture !== this.drawn) this.draw();
  }

  // Everything that the drawing depends on: most answers from Python change nothing.
  get picture() {
    return JSON.stringify([this.board.drawing, this.types, this.shownOverlay]);
  }

  // Runs an edit of the board that returns true if it changed anything, draws, and tells Python.
  change(edit) {
    if (!edit()) return false;
    this.serial += 1;
    this.draw();
    const { nodes } = this.board.drawing;
    this.send?.("edit", { serial: this.serial, cluster: nodes.length ? clusterOf(this.board.drawing) : null });
    return true;
  }

  get shownOverlay() {
    return this.overlay?.gpus.length === this.board.gpus.length ? this.overlay : null;
  }

  draw() {
    const active = this.root.getRootNode().activeElement, held = this.layer.contains(active);
    const svg = this.find("board"), aspect = svg.clientWidth / svg.clientHeight || 1.6;
    const { layout, items } = draw(this.layer, this.board.drawing, this.types, this.shownOverlay, aspect);
    this.items = items;
    this.drawn = this.picture;
    this.view.show(layout);
    this.show();
    if (held) (this.items.get(this.focused) ?? svg).focus({ preventScroll: true });
  }

  // Selection, focus, buttons: all that may change without the drawing.
  show() {
    const panel = this.find("inspector"), active = () => this.root.getRootNode().activeElement;
    const inPanel = panel.contains(active());
    if (!this.items.has(this.focused)) this.focused = this.items.keys().next().value ?? null;
    for (const [id, one] of this.items) {
      const chosen = this.board.selected.has(id);
      one.classList.toggle("selected", chosen);
      one.setAttribute("aria-pressed", String(chosen));
      one.setAttribute("tabindex", id === this.focused ? "0" : "-1");
    }
    this.inspector.show();
    // After a button that has gone with the selection the focus goes to the board.
    if (inPanel && !panel.contains(active())) (this.items.get(this.focused) ?? this.find("board")).focus({ preventScroll: true });
    const { drawing, gpus, past, future } = this.board;
    this.find("undo").disabled = !past.length;
    this.find("redo").disabled = !future.length;
    this.find("clear").disabled = !gpus.length;
    this.find("count").textContent = gpus.length
      ? `${plural(gpus.length, "GPU")} in ${plural(drawing.nodes.length, "node")}` : "Nothing drawn yet";
  }

  say(text) {
    this.find("said").textContent = text;
  }

  fillPalette(types) {
    if (this.types && Object.keys(this.types).join() === Object.keys(types).join()) return;
    this.find("palette").replaceChildren(...Object.entries(types).map(([name, type]) => {
      const one = html("button", { type: "button", title: `Drag ${name} onto the board, or press to add it`, "data-type": name }, [
        html("span", { className: "swatch", "aria-hidden": "true" }), html("span", { textContent: name }),
      ]);
      one.firstChild.style.background = type.colour;
      return one;
    }));
  }

  // nodeId: null for a new node.
  addType(name, nodeId) {
    const grows = this.board.nodeOf(nodeId);
    // A node of these GPUs has ports that may not be the datasheet's: a further one is like its fellows.
    const fellow = grows?.gpus.find((gpu) => gpu.type === name);
    this.change(() => {
      const added = this.board.add(fellow ?? this.types[name].gpu, nodeId);
      this.board.selected = new Set([added]);
      this.focused = added;
      this.say(`Added ${name} to ${this.board.nodeOf(added).name}.`);
      return true;
    });
    this.reveal(this.focused);
  }

  // Node to which a press on the palette adds: the selected one, or that of the selected GPU or link; null for a new one.
  get target() {
    const [first] = this.board.selected;
    return first ? this.board.nodeOf(first.replace("link ", ""))?.id ?? null : null;
  }

  moveGpus(ids, nodeId) {
    if (this.change(() => this.board.move(ids, nodeId)))
      this.say(`Moved ${plural(ids.length, "GPU")} to ${this.board.nodeOf(ids[0]).name}.`);
    this.focusItem(this.focused);
  }

  duplicate(count) {
    const before = this.board.gpus.length;
    if (this.change(() => this.board.duplicate(count))) this.say(`Added ${plural(this.board.gpus.length - before, "GPU")}.`);
    else if (before) this.say(`A drawing has at most ${MOST_GPUS.toLocaleString("en")} GPUs.`);
  }

  removeSelected(ids = this.board.selected) {
    const before = this.board.gpus.length;
    if (this.change(() => this.board.remove(new Set(ids)))) this.say(`Removed ${plural(before - this.board.gpus.length, "GPU")}.`);
    else if (ids.size) this.say("Links and the fabric stay: they come with the nodes.");
  }

  clear() {
    if (this.change(() => this.board.clear())) this.say("Cleared. Undo brings it back.");
  }

  undo() {
    if (this.change(() => this.board.undo())) this.say("Undone.");
  }

  redo() {
    if (this.change(() => this.board.redo())) this.say("Done again.");
  }

  select(id, more) {
    const { selected } = this.board;
    if (!more) {
      selected.clear();
      selected.add(id);
    } else if (!selected.delete(id)) {
      selected.add(id);
    }
    this.focused = id;
    this.show();
  }

  selectNothing() {
    this.board.selected.clear();
    this.show();
  }

  selectArea(one, other) {
    const [left, right] = [Math.min(one.x, other.x), Math.max(one.x, other.x)];
    const [top, bottom] = [Math.min(one.y, other.y), Math.max(one.y, other.y)];
    const inside = (at) => at.x < right && at.x + at.width > left && at.y < bottom && at.y + at.height > top;
    const gpus = this.view.layout.nodes.flatMap((box) => box.gpus.filter(inside));
    this.board.selected = new Set(gpus.map((gpu) => gpu.id));
    this.show();
    this.say(`${plural(gpus.length, "GPU")} selected.`);
  }

  focusItem(id) {
    this.focused = id;
    this.show();
    this.items.get(this.focused)?.focus({ preventScroll: true });
    this.reveal(this.focused);
  }

  reveal(id) {
    const one = this.items.get(id);
    if (one) this.view.reveal(one.getBBox());
  }

  listen() {
    const on = (part, name, act) => this.find(part).addEventListener(name, act);
    const acts = {
      undo: () => this.undo(), redo: () => this.redo(), clear: () => this.clear(), fit: () => this.view.fit(),
      "zoom-in": () => this.view.zoom(1.3), "zoom-out": () => this.view.zoom(1 / 1.3),
    };
    for (const [part, act] of Object.entries(acts))
      on(part, "click", (event) => {
        act();
        // A button that can do no more loses the focus, which then would be nowhere.
        if (event.currentTarget.disabled) this.find("board").focus({ preventScroll: true });
      });
    on("board", "focusin", (event) => {
      const one = event.target.closest(".item");
      if (one) this.focused = one.dataset.id;
    });
    on("palette", "click", (event) => {
      const name = event.target.closest("button")?.dataset.type;
      // A pointer's click was dealt with when it was let go.
      if (name && event.detail === 0) this.addType(name, event.shiftKey ? null : this.target);
    });
    on("studio", "keydown", (event) => {
      if (!this.key(event)) return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  // True if a key was for the board.
  key(event) {
    const control = event.ctrlKey || event.metaKey, key = event.key.toLowerCase(), from = event.target;
    if (from.matches("input, select")) {
      if (key !== "escape") return false;
      this.focusItem(this.focused);
    } else if (control && key === "z") event.shiftKey ? this.redo() : this.undo();
    else if (control && key === "y") this.redo();
    else if (key === "escape") this.selectNothing();
    else if (!this.find("board").contains(from)) return false;
    else if (control && key === "a") {
      this.board.selected = new Set(this.board.gpus.map((gpu) => gpu.id));
      this.show();
    } else if (control && key === "d") this.duplicate(1);
    else return !control && this.plainKey(key);
    return true;
  }

  plainKey(key) {
    const ids = [...this.items.keys()], at = ids.indexOf(this.focused);
    const head = (id) => ["node", "fabric"].includes(this.items.get(id).dataset.kind);
    const go = (id) => id !== undefined && this.focusItem(id);
    const acts = {
      arrowright: () => go(ids[at + 1]),
      arrowleft: () => go(ids[at - 1]),
      arrowdown: () => go(ids.find((id, place) => place > at && head(id))),
      arrowup: () => go(ids.findLast((id, place) => place < at && head(id))),
      home: () => go(ids[0]),
      end: () => go(ids.at(-1)),
      " ": () => this.items.size && this.select(this.focused, true),
      enter: () => {
        if (!this.items.size) return;
        if (!this.board.selected.has(this.focused)) this.select(this.focused, false);
        this.inspector.focus();
      },
      delete: () => this.removeSelected(this.board.selected.size ? this.board.selected : new Set([this.focused])),
      "+": () => this.view.zoom(1.3), "=": () => this.view.zoom(1.3), "-": () => this.view.zoom(1 / 1.3), 0: () => this.view.fit(),
    };
    acts.backspace = acts.delete;
    acts[key]?.();
    return key in acts;
  }
}

let kept = null; // the board of the last visit to this page, for as long as the tab lives

export default function ({ parentElement, data, setStateValue }) {
  if (!parentElement.studio) {
    parentElement.studio = new Studio(parentElement, data, kept);
    kept = parentElement.studio.board;
  }
  const { studio } = parentElement;
  studio.take(data, setStateValue);
  studio.resized.observe(studio.find("board"));
  return () => studio.resized.disconnect();
}
