// The live view of one job. Python sends the parts of the picture as HTML, and log lines as they arrive;
// this file puts them into the page, and sends clicks back. All text of a job is escaped: the parts
// by Python, log lines by textContent here. page.js and charts.js precede it in the same module.

// -- the log: kept, filtered, searched, followed ---------------------------------------------------------------------

const MAX_LINES = 5000; // kept in the page; all are in the job's log
const SHOWN_LINES = 1000; // in the document at a time
const FOLLOWED_LINES = 100; // in the document while it is followed: layout and paint take longer with each line

class LogView {
  constructor(ask, announce) {
    this.choice = { rank: "", search: "", follow: true };
    this.ended = false;
    this.lines = []; // {number, rank, prefix, text}
    this.next = 0;
    this.shown = 0;
    this.top = 0;
    this.frame = 0;
    this.complete = false; // whether this view has received the lines from before it
    this.box = element("div", { ...OWN_KEYS, class: "kd-lines", role: "log", "aria-label": "Log", "aria-live": "off", tabindex: "0" });
    this.empty = element("div", { class: "kd-empty" }, "No output");
    this.count = element("span", { class: "kd-count" });
    this.rank = element("select", { ...OWN_KEYS, "aria-label": "Lines of", onchange: () => this.filter("rank", this.rank.value) });
    this.search = element("input", {
      type: "search", placeholder: "Search the log", "aria-label": "Search the log",
      oninput: () => this.filter("search", this.search.value),
    });
    this.follow = element("button", { type: "button", onclick: () => this.setFollow(!this.choice.follow) }, "Follow");
    const copied = element("button", { type: "button", onclick: () => {
      copy(this.matching().map((line) => `${line.prefix} ${line.text}`).join("\n"));
      announce("The lines shown were copied");
    } }, "Copy");
    const download = element("button", { type: "button", onclick: () => ask("download") }, "Download");
    this.bar = element("div", { class: "kd-bar", hidden: true }, this.rank, this.search, this.follow, copied, download, this.count);
    this.node = element("div", { class: "kd-log" }, this.bar, this.box);
    this.box.append(this.empty);
    this.box.addEventListener("wheel", (event) => event.deltaY < 0 && this.setFollow(false), { passive: true });
    this.box.addEventListener("keydown", (event) => ["ArrowUp", "PageUp", "Home"].includes(event.key) && this.setFollow(false));
    // A followed log scrolls, so its lines cannot be selected, nor its scrollbar dragged.
    this.box.addEventListener("pointerdown", () => this.setFollow(false));
    this.box.addEventListener("scroll", () => this.box.isConnected && (this.top = this.box.scrollTop));
    this.setFollow(true);
  }

  setRanks(ranks) {
    this.rank.replaceChildren(
      element("option", { value: "" }, "All ranks"),
      ...Array.from({ length: ranks }, (_, rank) => element("option", { value: String(rank) }, `Rank ${rank}`)),
    );
    this.rank.value = this.choice.rank;
  }

  // Restore the scroll position, which an element loses when it leaves the page.
  shownAgain() {
    this.box.scrollTop = this.top;
    this.toEnd();
  }

  // How many lines the document has room for.
  get room() {
    return this.choice.follow && !this.ended ? FOLLOWED_LINES : SHOWN_LINES;
  }

  setFollow(on) {
    if (on !== this.choice.follow) this.choose(() => (this.choice.follow = on));
    this.follow.setAttribute("aria-pressed", String(on));
    this.toEnd();
  }

  setEnded(ended) {
    if (ended !== this.ended) this.choose(() => (this.ended = ended));
  }

  // Apply a choice that may make room for more lines; they are put above the present ones, which do not move.
  choose(change) {
    change();
    const missing = this.matching().slice(-this.room);
    const rows = missing.slice(0, Math.max(0, missing.length - this.shown)).map((line) => this.row(line));
    if (!rows.length) return;
    const below = this.box.scrollHeight - this.box.scrollTop;
    this.empty.remove();
    this.box.prepend(...rows);
    this.shown += rows.length;
    this.box.scrollTop = this.box.scrollHeight - below;
    this.toEnd();
  }

  filter(what, value) {
    this.choice[what] = value;
    this.draw();
  }

  matches(line) {
    const { rank, search } = this.choice;
    return (rank === "" || String(line.rank) === rank) && (!search || line.text.toLowerCase().includes(search.toLowerCase()));
  }

  matching() {
    return this.lines.filter((line) => this.matches(line));
  }

  row(line) {
    const who = element("span", { class: `kd-who kd-who-${line.rank === null ? "x" : line.rank % 6}` }, line.prefix);
    return element("div", { class: "kd-line" }, who, " ", ...this.marked(line.text));
  }

  // The text in pieces, with the matches of the search marked.
  marked(text) {
    const [wanted, within] = [this.choice.search.toLowerCase(), text.toLowerCase()];
    // Some letters become two in lower case, which shifts positions.
    if (!wanted || within.length !== text.length) return [text];
    const pieces = [];
    let end = 0;
    for (let at; (at = within.indexOf(wanted, end)) >= 0; end = at + wanted.length) {
      pieces.push(text.slice(end, at), element("mark", {}, text.slice(at, at + wanted.length)));
    }
    return [...pieces, text.slice(end)];
  }

  // Add lines, numbered from `first`. Known ones are ignored, because several views of one job share the messages.
  add(first, added) {
    const got = added.map(([rank, prefix, text], index) => ({ number: first + index, rank, prefix, text }));
    const older = got.filter((line) => this.lines.length && line.number < this.lines[0].number);
    const fresh = got.filter((line) => line.number >= this.next);
    if (fresh.length) this.next = fresh[fresh.length - 1].number + 1;
    this.lines = [...older, ...this.lines, ...fresh].slice(-MAX_LINES);
    if (older.length) {
      this.draw();
      return;
    }
    const rows = fresh.filter((line) => this.matches(line)).slice(-this.room).map((line) => this.row(line));
    if (rows.length) {
      this.empty.remove();
      this.box.append(...rows);
      this.shown += rows.length;
      for (; this.shown > this.room; this.shown -= 1) this.box.firstElementChild.remove();
    }
    this.tell();
    if (rows.length) this.toEnd();
  }

  // Once a frame: to read a height in between lays out whatever has changed in the page.
  toEnd() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      if (this.choice.follow) this.box.scrollTop = this.box.scrollHeight;
    });
  }

  clear() {
    this.lines = [];
    this.next = 0;
    this.complete = false;
    this.draw();
  }

  draw() {
    const found = this.matching();
    const rows = found.slice(-this.room).map((line) => this.row(line));
    this.shown = rows.length;
    this.empty.textContent = this.lines.length ? "No line matches" : "No output";
    this.box.replaceChildren(...(rows.length ? rows : [this.empty]));
    this.toEnd();
    this.tell(found.length);
  }

  tell(found) {
    const filtered = this.choice.rank !== "" || this.choice.search !== "";
    const full = this.lines.length === MAX_LINES; // there may be more before them
    this.bar.hidden = !this.lines.length;
    const lines = `${full ? "the last " : ""}${this.lines.length.toLocaleString("en")} line${this.lines.length === 1 ? "" : "s"}`;
    this.count.textContent = filtered ? `${(found ?? this.matching().length).toLocaleString("en")} of ${lines}` : lines;
    this.count.title = full ? "Download has all of them" : "";
  }
}

// -- the job ---------------------------------------------------------------------------------------------------------

const ANSWER_MS = 2000; // a kernel that runs a cell may answer only after the cell
const SAID_MS = 6000;
const MAX_WAIT_MS = 60000;
const ENDED = ["succeeded", "failed", "cancelled"];
const PARTS = ["head", "progress", "error", "curves", "history", "ranks", "notes"];
const HISTORY_TITLE = "Memory, GPUs and waiting"; // as in job/view/curves.py
const AFTER = {
  cancel: "The job will be cancelled then.",
  retry: "The job will be submitted again then.",
  plan: "The plan will be copied then.",
  download: "The download will start then.",
};

// All views of each job: a front end may remove a view and create another, which then reuses the removed one.
const views = new Map();

// One view of a job. It outlives the front end's view: `attach` puts it into the page, also after a removal.
class JobView {
  constructor() {
    this.id = crypto.randomUUID?.() ?? String(Math.random());
    this.open = {};
    this.timers = {};
    this.visible = null;
    this.onScreen = true;
    this.focused = null;
    this.said = element("div", { class: "kd-said", role: "status" });
    this.log = new LogView((what) => this.ask(what), (text) => this.announce(text));
    this.charts = { curves: new ChartsView(), history: new ChartsView() };
    const fold = element("details", { class: "kd-history" }, element("summary", {}, HISTORY_TITLE), this.charts.history.node);
    const drawn = { curves: this.charts.curves.node, history: fold };
    this.places = Object.fromEntries(PARTS.map((part) => [part, drawn[part] ?? element("div", { class: `kd-${part}` })]));
    // The button stays in place during the question, so that the second click of a double click does nothing.
    this.cancel = this.button("Cancel", () => this.confirm(true), "kd-danger");
    this.no = this.button("No", () => this.confirm(false));
    const yes = this.button("Yes, cancel the job", () => { this.confirm(false); this.ask("cancel"); }, "kd-danger");
    this.sure = element("span", { class: "kd-sure", role: "group", "aria-label": "Cancel the job?", hidden: true }, yes, this.no);
    this.sure.addEventListener("keydown", (event) => event.key === "Escape" && this.confirm(false));
    this.retry = this.button("Retry", () => this.ask("retry"));
    this.plan = this.button("", () => this.ask("plan"));
    this.closing = element("span", { class: "kd-closing" });
    const actions = element("div", { class: "kd-actions" }, this.cancel, this.sure, this.retry, this.plan, this.closing, this.said);
    const { head, ...others } = this.places;
    this.root = element("div", { class: "kd-job", role: "group" }, head, actions, ...Object.values(others), this.log.node);
    this.root.addEventListener("focusin", (event) => (this.focused = event.target));
    this.root.addEventListener("focusout", () => setTimeout(() => this.root.isConnected && !this.root.contains(document.activeElement) && (this.focused = null)));
    this.observer = new IntersectionObserver((entries) => {
      this.onScreen = entries[entries.length - 1].isIntersecting;
      // An element outside of the page cannot be scrolled.
      if (this.onScreen) this.log.shownAgain();
      this.see();
    });
    this.see = this.see.bind(this);
    this.watched = [
      // Each in a task of its own, so that lines of the log wait for one of them alone.
      ...PARTS.map((part) => [`change:${part}`, () => this.later(part, 0, () => this.drawPart(part))]),
      ["change:state", () => this.drawActions()],
      ["change:name", () => this.drawActions()],
      ["change:closing", () => this.drawActions()],
      ["change:world_size", () => this.log.setRanks(this.model.get("world_size"))],
      ["change:job_number", () => { this.log.clear(); this.tellHere(); }],
      ["comm_live_update", () => this.checkKernel()],
      ["msg:custom", (message, buffers) => this.receive(message, buffers)],
    ];
  }

  button(text, onclick, kind = "") {
    return element("button", { type: "button", class: kind, onclick }, text);
  }

  attach(model, el) {
    this.detach();
    this.model = model;
    this.el = el;
    el.append(this.root);
    PARTS.forEach((part) => this.drawPart(part));
    this.drawActions();
    this.log.setRanks(model.get("world_size"));
    if (this.focused && document.activeElement === document.body) this.focused.focus({ preventScroll: true });
    this.watched.forEach(([event, callback]) => model.on(event, callback));
    this.observer.observe(this.root);
    document.addEventListener("visibilitychange", this.see);
    this.see();
    keepInNotebook(model, () => model.get("picture"));
    model.widget_manager?.get_model?.(model.get("identity")).then((found) => {
      this.found = found;
      this.checkKernel();
    }, () => {});
  }

  detach() {
    if (!this.model) return;
    this.watched.forEach(([event, callback]) => this.model.off(event, callback));
    this.observer.disconnect();
    document.removeEventListener("visibilitychange", this.see);
    Object.values(this.timers).forEach(clearTimeout);
    this.tell({ tell: "gone", view: this.id });
    this.model = this.visible = null;
  }

  // Replace the view by a picture if its kernel has ended.
  checkKernel() {
    // Other pages than Jupyter's do not say whether it lives.
    if (this.found?.comm_live !== false || !this.model) return;
    const { model, el } = this;
    this.detach();
    this.root.remove();
    el.innerHTML = model.get("picture");
  }

  // Send a message; sending fails after the kernel has ended.
  tell(message) {
    try {
      this.model.send(message);
    } catch (error) {
      console.debug("kale_dist", error);
    }
  }

  later(name, wait_ms, callback) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(callback, wait_ms);
  }

  // Report whether the page is visible: the kernel sends nothing to a hidden page, and the missed lines when it is visible
  // again. Repeated until the kernel answers: before the kernel has a subshell for the page, messages wait for the cell.
  see() {
    const now = this.onScreen && document.visibilityState === "visible";
    if (now !== this.visible) {
      this.visible = now;
      this.tellHere();
    }
  }

  tellHere(wait_ms = 1000) {
    this.later("here", wait_ms, () => this.tellHere(Math.min(2 * wait_ms, MAX_WAIT_MS)));
    const next = this.log.complete ? this.log.next : 0;
    this.tell({ tell: "here", view: this.id, next, visible: this.visible, table: this.open.ranks ?? false });
  }

  ask(what) {
    this.asked = what;
    this.tell({ ask: what, view: this.id });
    this.later("answer", ANSWER_MS, () => this.announce(`The kernel is busy: stop the cell first (■ in the toolbar). ${AFTER[what]}`, true));
  }

  announce(text, stays = false) {
    this.said.textContent = text;
    clearTimeout(this.timers.said);
    if (!stays) this.later("said", SAID_MS, () => (this.said.textContent = ""));
  }

  receive(message, buffers) {
    if (message.lines) this.log.add(message.first, message.lines);
    if (message.view !== this.id) return;
    if (message.heard) {
      clearTimeout(this.timers.here);
      if (message.heard === "visible") this.log.complete = true;
      return;
    }
    clearTimeout(this.timers.answer);
    const late = this.asked === "cancel" && ENDED.includes(this.model.get("state"));
    if (message.say && !late) this.announce(message.say);
    if (message.plan) copy(message.plan).then(() => this.announce("Copied"));
    if (message.file) save(message.file, buffers);
  }

  confirm(open) {
    this.sure.hidden = !open;
    this.cancel.disabled = open;
    (open ? this.no : this.cancel).focus();
  }

  drawPart(part) {
    if (this.charts[part]) {
      this.charts[part].take(this.model.get(part));
      if (part === "history") this.places[part].hidden = !this.charts[part].hasLines;
      return;
    }
    const place = this.places[part];
    const fresh = place.cloneNode(false);
    const drawn = this.model.get(part);
    // Lines of the log would wait for a table of many ranks that is not seen.
    const isFolded = part === "ranks" && drawn.includes("<summary") && !this.open[part];
    fresh.innerHTML = isFolded ? drawn.slice(0, drawn.indexOf("</summary>")) : drawn;
    fresh.hidden = !drawn;
    morph(place, fresh);
    for (const fold of place.querySelectorAll("details")) {
      fold.open = this.open[part] ?? fold.open;
      fold.ontoggle = () => {
        const isNew = fold.open !== (this.open[part] ?? false);
        this.open[part] = fold.open;
        if (!isNew || part !== "ranks") return;
        this.drawPart(part);
        this.tellHere();
      };
    }
  }

  drawActions() {
    const state = this.model.get("state");
    const ended = ENDED.includes(state);
    const focused = this.sure.contains(document.activeElement) || document.activeElement === this.cancel;
    if (ended) {
      this.sure.hidden = true;
      this.cancel.disabled = false;
      if (this.asked === "cancel") this.announce("");
    }
    this.cancel.hidden = ended;
    this.retry.hidden = !ended;
    this.log.setEnded(ended);
    if (ended && focused) this.retry.focus();
    this.plan.textContent = this.model.get("plan_word");
    this.closing.textContent = this.model.get("closing");
    this.root.setAttribute("aria-label", `Job ${this.model.get("name")}, ${state}`);
    this.root.dataset.state = state;
  }
}

function render({ model, el }) {
  const identity = model.get("identity");
  if (!views.has(identity)) views.set(identity, []);
  let view = views.get(identity).find((one) => !one.root.isConnected);
  if (!view) {
    view = new JobView();
    views.get(identity).push(view);
  }
  view.attach(model, el);
  return () => view.model === model && view.detach();
}

// Report that this page has widgets, whether or not it shows the job; without a report the kernel replaces the widget by a
// picture. Repeated, because messages wait for the running cell until the kernel has a subshell for this page.
function initialize({ model }) {
  const timers = [0, 1000, 3000].map((wait_ms) => setTimeout(() => {
    try {
      model.send({ tell: "loaded" });
    } catch (error) {
      console.debug("kale_dist", error);
    }
  }, wait_ms));
  return () => timers.forEach(clearTimeout);
}

export default { initialize, render };
