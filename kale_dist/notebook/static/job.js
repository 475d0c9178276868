// The live view of one job. Python sends parts of the picture as HTML of its own making, and log lines as they come;
// this file puts them into the page, and sends back what is clicked. Everything that came from a job is escaped: parts
// in Python, log lines here by textContent.

const MAX_LINES = 5000; // kept in the page; all are in the job's log
const SHOWN_LINES = 1000; // in the document at a time
const ANSWER_MS = 2000; // a kernel that runs a cell may answer late, or never before the cell ends
const PARTS = ["head", "progress", "error", "curves", "ranks", "notes"];

// What the user has set in a view: a front end may take a view away and put another one in its place.
const choices = new Map();

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that are not served over TLS have no clipboard.
    const area = element("textarea", { style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function save(name, parts) {
  const link = element("a", { href: URL.createObjectURL(new Blob(parts, { type: "text/plain" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

class LogView {
  constructor(model, choice, ask, announce) {
    this.model = model;
    this.choice = choice;
    this.lines = []; // {number, rank, text}
    this.next = 0;
    this.skipped = 0;
    this.shown = 0;
    this.box = element("div", { class: "kd-lines", role: "log", "aria-label": "Log", "aria-live": "off", tabindex: "0" });
    this.empty = element("div", { class: "kd-empty" }, "Nothing was printed yet.");
    this.count = element("span", { class: "kd-count" });
    this.rank = element("select", { "aria-label": "Lines of", onchange: () => this.filter("rank", this.rank.value) });
    this.search = element("input", {
      type: "search", placeholder: "Search the log", "aria-label": "Search the log", value: choice.search,
      oninput: () => this.filter("search", this.search.value),
    });
    this.follow = element("button", { type: "button", onclick: () => this.setFollow(!this.choice.follow) }, "Follow");
    const copied = element("button", { type: "button", onclick: () => {
      copy(this.matching().map((line) => `${this.prefix(line)} ${line.text}`).join("\n"));
      announce("The lines shown were copied");
    } }, "Copy");
    const download = element("button", { type: "button", onclick: () => ask("download") }, "Download");
    this.bar = element("div", { class: "kd-bar" }, this.rank, this.search, this.follow, copied, download, this.count);
    this.node = element("div", { class: "kd-log" }, this.bar, this.box);
    this.box.append(this.empty);
    this.box.addEventListener("wheel", (event) => event.deltaY < 0 && this.setFollow(false), { passive: true });
    this.box.addEventListener("keydown", (event) => ["ArrowUp", "PageUp", "Home"].includes(event.key) && this.setFollow(false));
    this.setFollow(choice.follow);
    this.setRanks();
  }

  setRanks() {
    const ranks = this.model.get("world_size");
    this.rank.replaceChildren(
      element("option", { value: "" }, "All ranks"),
      ...Array.from({ length: ranks }, (_, rank) => element("option", { value: String(rank) }, `Rank ${rank}`)),
    );
    this.rank.value = this.choice.rank;
  }

  setFollow(on) {
    this.choice.follow = on;
    this.follow.setAttribute("aria-pressed", String(on));
    if (on) this.box.scrollTop = this.box.scrollHeight;
  }

  filter(what, value) {
    this.choice[what] = value;
    this.draw();
  }

  prefix(line) {
    return `[${line.rank === null ? "kale-dist" : line.rank}]`;
  }

  matches(line) {
    const { rank, search } = this.choice;
    return (rank === "" || String(line.rank) === rank) && (!search || line.text.toLowerCase().includes(search.toLowerCase()));
  }

  matching() {
    return this.lines.filter((line) => this.matches(line));
  }

  row(line) {
    const who = element("span", { class: `kd-who kd-who-${line.rank === null ? "x" : line.rank % 6}` }, this.prefix(line));
    return element("div", { class: "kd-line" }, who, ` ${line.text}`);
  }

  // New lines, numbered from `first`. What is here already is passed over: several views of one job share the messages.
  add(first, added) {
    const fresh = [];
    added.forEach(([rank, text], index) => {
      if (first + index >= this.next) fresh.push({ number: first + index, rank, text });
    });
    if (!fresh.length) return;
    if (fresh[0].number > this.next) this.skipped += fresh[0].number - this.next;
    this.next = fresh[fresh.length - 1].number + 1;
    this.lines.push(...fresh);
    if (this.lines.length > MAX_LINES) this.lines.splice(0, this.lines.length - MAX_LINES);
    const rows = fresh.filter((line) => this.matches(line)).slice(-SHOWN_LINES).map((line) => this.row(line));
    if (rows.length) {
      this.empty.remove();
      this.box.append(...rows);
      this.shown += rows.length;
      for (; this.shown > SHOWN_LINES; this.shown -= 1) this.box.firstElementChild.remove();
      if (this.choice.follow) this.box.scrollTop = this.box.scrollHeight;
    }
    this.tell();
  }

  draw() {
    const found = this.matching();
    const rows = found.slice(-SHOWN_LINES).map((line) => this.row(line));
    this.shown = rows.length;
    this.empty.textContent = this.lines.length ? "No line is like that." : "Nothing was printed yet.";
    this.box.replaceChildren(...(rows.length ? rows : [this.empty]));
    if (this.choice.follow) this.box.scrollTop = this.box.scrollHeight;
    this.tell(found.length);
  }

  tell(found) {
    const filtered = this.choice.rank !== "" || this.choice.search !== "";
    const lines = `${this.next.toLocaleString("en")} line${this.next === 1 ? "" : "s"}`;
    this.count.textContent = filtered ? `${(found ?? this.matching().length).toLocaleString("en")} of ${lines}` : lines;
    const hidden = this.next > MAX_LINES || this.skipped > 0;
    this.count.title = hidden ? "The last lines are kept here. Download has all of them." : "";
  }
}

function render({ model, el }) {
  const view = crypto.randomUUID?.() ?? String(Math.random());
  if (!choices.has(model.model_id ?? model)) {
    choices.set(model.model_id ?? model, { rank: "", search: "", follow: true, open: {} });
  }
  const choice = choices.get(model.model_id ?? model);
  const root = element("div", { class: "kd-job", role: "group" });
  const said = element("div", { class: "kd-said", role: "status" });
  let forget;
  const announce = (text) => {
    said.textContent = text;
    clearTimeout(forget);
    forget = setTimeout(() => (said.textContent = ""), 6000);
  };

  let waiting;
  const ask = (what, more = {}) => {
    model.send({ ask: what, view, ...more });
    clearTimeout(waiting);
    waiting = setTimeout(() => announce("The kernel is busy: stop the cell first (■ in the toolbar). The job runs on then; press ■ again to cancel it."), ANSWER_MS);
  };

  const log = new LogView(model, choice, ask, announce);
  const places = Object.fromEntries(PARTS.map((part) => [part, element("div", { class: `kd-${part}` })]));
  const cancel = element("button", { type: "button", class: "kd-danger", onclick: () => confirmCancel(true) }, "Cancel");
  const yes = element("button", { type: "button", class: "kd-danger", onclick: () => { confirmCancel(false); ask("cancel"); } }, "Yes, cancel the job");
  const no = element("button", { type: "button", onclick: () => confirmCancel(false) }, "No");
  const sure = element("span", { class: "kd-sure", role: "group", "aria-label": "Cancel the job?", hidden: true }, yes, no);
  const retry = element("button", { type: "button", onclick: () => ask("retry") }, "Retry");
  const yaml = element("button", { type: "button", onclick: () => ask("plan") }, "Copy plan");
  const actions = element("div", { class: "kd-actions" }, cancel, sure, retry, yaml, said);

  function confirmCancel(open) {
    sure.hidden = !open;
    cancel.hidden = open;
    (open ? no : cancel).focus();
  }
  sure.addEventListener("keydown", (event) => event.key === "Escape" && confirmCancel(false));

  function drawPart(part) {
    const place = places[part];
    place.innerHTML = model.get(part);
    place.hidden = !model.get(part);
    // What was folded open stays so.
    for (const fold of place.querySelectorAll("details")) {
      fold.open = choice.open[part] ?? fold.open;
      fold.addEventListener("toggle", () => (choice.open[part] = fold.open));
    }
  }

  function drawActions() {
    const state = model.get("state");
    const ended = ["succeeded", "failed", "cancelled"].includes(state);
    if (ended && !sure.hidden) sure.hidden = true;
    cancel.hidden = ended || !sure.hidden;
    retry.hidden = !ended;
    yaml.textContent = model.get("plan_word");
    root.setAttribute("aria-label", `Job ${model.get("name")}, ${state}`);
    root.dataset.state = state;
  }

  function receive(message, buffers) {
    if (message.lines) log.add(message.first, message.lines);
    if (message.view !== view) return;
    clearTimeout(waiting);
    if (message.say) announce(message.say);
    if (message.plan) copy(message.plan).then(() => announce("Copied"));
    if (message.file) save(message.file, buffers);
  }

  root.append(places.head, actions, places.progress, places.error, places.curves, places.ranks, places.notes, log.node);
  el.append(root);
  PARTS.forEach(drawPart);
  drawActions();
  const watched = [
    ...PARTS.map((part) => [`change:${part}`, () => drawPart(part)]),
    ["change:state", drawActions],
    ["change:name", drawActions],
    ["change:world_size", () => log.setRanks()],
    ["change:job_number", () => { log.lines = []; log.next = 0; log.skipped = 0; log.draw(); model.send({ tell: "here", view, next: 0, visible: true }); }],
    ["msg:custom", receive],
  ];
  watched.forEach(([event, callback]) => model.on(event, callback));

  // A page that nobody sees is sent nothing; what it missed is sent when it is seen again.
  let visible = null;
  let onScreen = true;
  const tellVisible = () => {
    const now = onScreen && document.visibilityState === "visible";
    if (now !== visible) {
      visible = now;
      model.send({ tell: "here", view, next: log.next, visible });
    }
  };
  const observer = new IntersectionObserver((entries) => {
    onScreen = entries[entries.length - 1].isIntersecting;
    tellVisible();
  });
  observer.observe(root);
  document.addEventListener("visibilitychange", tellVisible);
  tellVisible();

  return () => {
    observer.disconnect();
    document.removeEventListener("visibilitychange", tellVisible);
    watched.forEach(([event, callback]) => model.off(event, callback));
    clearTimeout(forget);
    clearTimeout(waiting);
    model.send({ tell: "gone", view });
  };
}

export default { render };
