
// The log of a job: kept, filtered, searched, followed.

const MAX_LINES = 5000; // kept in the page; all are in the job's log
const SHOWN_LINES = 1000; // in the document at a time
const FOLLOWED_LINES = 250; // in the document while they run past: layout and paint cost as much as there are

class LogView {
  constructor(ask, announce) {
    this.choice = { rank: "", search: "", follow: true };
    this.ended = false;
    this.lines = []; // {number, rank, text}
    this.next = 0;
    this.shown = 0;
    this.top = 0;
    this.complete = false; // whether the lines from before this view have come
    this.box = element("div", { ...OWN_KEYS, class: "kd-lines", role: "log", "aria-label": "Log", "aria-live": "off", tabindex: "0" });
    this.empty = element("div", { class: "kd-empty" }, "Nothing was printed yet.");
    this.count = element("span", { class: "kd-count" });
    this.rank = element("select", { ...OWN_KEYS, "aria-label": "Lines of", onchange: () => this.filter("rank", this.rank.value) });
    this.search = element("input", {
      type: "search", placeholder: "Search the log", "aria-label": "Search the log",
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
    // Lines that run cannot be selected, nor a scrollbar be drawn.
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

  // Scrolled to where it was: a part of a page that is taken away forgets that.
  shownAgain() {
    this.box.scrollTop = this.top;
    this.toEnd();
  }

  // How many lines are in the document.
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

  // Make a choice that may leave room for more lines: they go above those that are there, which stay where they are.
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
    const got = added.map(([rank, text], index) => ({ number: first + index, rank, text }));
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

  toEnd() {
    if (this.choice.follow) this.box.scrollTop = this.box.scrollHeight;
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
    this.empty.textContent = this.lines.length ? "No line is like that." : "Nothing was printed yet.";
    this.box.replaceChildren(...(rows.length ? rows : [this.empty]));
    this.toEnd();
    this.tell(found.length);
  }

  tell(found) {
    const filtered = this.choice.rank !== "" || this.choice.search !== "";
    const lines = `${this.next.toLocaleString("en")} line${this.next === 1 ? "" : "s"}`;
    this.count.textContent = filtered ? `${(found ?? this.matching().length).toLocaleString("en")} of ${lines}` : lines;
    const hidden = this.next > this.lines.length;
    this.count.title = hidden ? "The last lines are kept here. Download has all of them." : "";
  }
}
