// The pointer on the board: a click selects; a drag moves GPUs, brings new ones, selects an area (Shift) or moves the view.

const NEAR = 4; // pixels that a pointer may wander and still click

function listenToPointer(studio) {
  const svg = studio.find("board"), palette = studio.find("palette");
  svg.addEventListener("pointerdown", (event) => { if (!event.button) press(studio, event); });
  palette.addEventListener("pointerdown", (event) => {
    const chosen = event.target.closest("button");
    if (chosen && !event.button) pressPalette(studio, event, chosen);
  });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // a page that is scrolled must not get stuck here
    event.preventDefault();
    studio.view.zoom(event.deltaY > 0 ? 1 / 1.15 : 1.15, studio.view.point(event));
  }, { passive: false });
}

function press(studio, event) {
  const { view, board } = studio, svg = studio.find("board");
  const hit = event.target.closest(".item"), more = event.shiftKey || event.ctrlKey || event.metaKey;
  const from = view.point(event), start = { ...view.box };
  if (!hit) svg.focus({ preventScroll: true });
  if (hit?.dataset.kind === "gpu" && !more) {
    const { id } = hit.dataset;
    // A GPU that is dragged takes the other selected ones along if it is one of them.
    const lifted = () => (board.selected.has(id) ? board.selectedGpus.map((gpu) => gpu.id) : [id]);
    carry(studio, svg, event, hit.querySelector(".chip").getAttribute("fill"), () => plural(lifted().length, "GPU"), {
      start: () => { for (const one of lifted()) studio.items.get(one).classList.add("lifted"); },
      node: (nodeId) => studio.moveGpus(lifted(), nodeId),
      palette: () => studio.removeSelected(new Set(lifted())),
      click: () => click(studio, hit, more),
      end: () => { for (const one of studio.items.values()) one.classList.remove("lifted"); },
    });
    return;
  }
  const area = event.shiftKey ? element("rect", { class: "area" }) : null;
  follow(svg, event, (now) => {
    if (area) {
      if (!area.parentNode) studio.layer.append(area);
      stretch(area, from, view.point(now));
    } else {
      view.pan(start, now.clientX - event.clientX, now.clientY - event.clientY);
    }
  }, (last, finished, moved) => {
    area?.remove();
    if (!finished) return;
    if (moved && area) studio.selectArea(from, view.point(last));
    else if (!moved && hit) click(studio, hit, more);
    else if (!moved && !more) studio.selectNothing();
  });
}

function click(studio, hit, more) {
  hit.focus({ preventScroll: true });
  studio.select(hit.dataset.id, more);
}

function pressPalette(studio, event, chosen) {
  const name = chosen.dataset.type;
  carry(studio, chosen, event, studio.types[name].colour, () => name, {
    node: (nodeId) => {
      studio.addType(name, nodeId);
      studio.focusItem(studio.focused);
    },
    click: () => studio.addType(name, event.shiftKey ? null : studio.target),
  });
}

// Something in the hand of the pointer, from its press on `target` until it is put down. acts: start, when it is lifted;
// node (its id, or null outside of the nodes) and palette, where it is put down; click, when it never moved; end, at last.
function carry(studio, target, event, colour, text, acts) {
  const ghost = studio.find("ghost");
  const over = (now) => {
    if (within(studio.find("board"), now)) return studio.view.layout.nodes.find((box) => contains(box, studio.view.point(now)))?.id ?? null;
    return acts.palette && within(studio.find("types"), now) ? "palette" : undefined;
  };
  const mark = (id) => {
    for (const one of studio.layer.querySelectorAll(".target")) one.classList.remove("target");
    studio.items.get(id)?.classList.add("target");
  };
  follow(target, event, (now, first) => {
    if (first) {
      acts.start?.();
      ghost.style.background = colour;
      ghost.hidden = false;
    }
    const place = over(now);
    const where = place === null ? "in a new node" : place === "palette" ? "remove" :
      place === undefined ? "" : `to ${studio.board.nodeOf(place).name}`;
    ghost.textContent = `${text()} ${where}`;
    ghost.style.transform = `translate(${now.clientX + 10}px, ${now.clientY + 10}px)`;
    mark(place);
  }, (last, finished, moved) => {
    ghost.hidden = true;
    mark(null);
    acts.end?.();
    if (!finished) return;
    const place = moved ? over(last) : undefined;
    if (!moved) acts.click();
    else if (place === "palette") acts.palette();
    else if (place !== undefined) acts.node(place);
  });
}

const contains = (box, at) => at.x >= box.x && at.x <= box.x + box.width && at.y >= box.y && at.y <= box.y + box.height;

function within(one, event) {
  const frame = one.getBoundingClientRect();
  return contains(frame, { x: event.clientX, y: event.clientY });
}

// Follow a pointer from its press until it is let go. move(event, true for the first one, some pixels from the press);
// done(last event, true if it was let go and not taken away or given up by Escape, true if it had moved).
function follow(target, press, move, done) {
  let moved = false;
  const stop = new AbortController(), listening = { signal: stop.signal };
  const end = (event, finished) => {
    stop.abort();
    done(event, finished, moved);
  };
  const mine = (act) => (event) => { if (event.pointerId === press.pointerId) act(event); };
  target.setPointerCapture(press.pointerId);
  target.addEventListener("pointermove", mine((event) => {
    if (!moved && Math.hypot(event.clientX - press.clientX, event.clientY - press.clientY) < NEAR) return;
    move(event, !moved);
    moved = true;
  }), listening);
  target.addEventListener("pointerup", mine((event) => end(event, true)), listening);
  target.addEventListener("pointercancel", mine((event) => end(event, false)), listening);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") end(press, false); }, { ...listening, capture: true });
}

function stretch(area, from, to) {
  area.setAttribute("x", Math.min(from.x, to.x));
  area.setAttribute("y", Math.min(from.y, to.y));
  area.setAttribute("width", Math.abs(from.x - to.x));
  area.setAttribute("height", Math.abs(from.y - to.y));
}
