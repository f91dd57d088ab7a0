// Sorts, filters and pages the tables of tensors, and shows the histogram of the selected tensor. Without JavaScript the
// page shows the worst rows of each table, and the worst histogram.
// Texts are inserted with textContent only, so no name in a checkpoint can become markup.
"use strict";
(() => {
  const PAGE = 200; // rows per page, because 50,000 would make the browser slow
  const NAME = 0, KIND = 1;

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };

  // The fragment of the URL stores the view, so that a link opens the same view.
  // 'filter=bn1' applies to every table of the page, 'filter2=bn1' to the second.
  const view = () => new URLSearchParams(location.hash.slice(1));
  const recall = (key, n) => view().get(key + n) ?? view().get(key) ?? "";
  const remember = (key, n, value) => {
    if (recall(key, n) === value) return;
    const next = view();
    next.delete(key + n);
    if ((next.get(key) ?? "") !== value) next.set(key + n, value);
    try {
      history.replaceState(null, "", "#" + next);
    } catch {
      // An embedded page may not change its URL; the table works without it.
    }
  };

  const rowsOf = (table, data) => {
    const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent));
    if (data === null) return rows;
    const { texts, rows: more } = JSON.parse(data.textContent);
    for (const [name, ...indices] of more) rows.push([name, ...indices.map((index) => texts[index])]);
    return rows;
  };

  // Sorts by the displayed text: '12 of 64' as 12, '1.5e-07' and '41.00%' as numbers, texts without a number last. Equal
  // texts keep the order "worst first", or its reverse, so that ascending is always descending backwards.
  const collator = new Intl.Collator("en", { numeric: true }); // layers.2 before layers.10
  const compare = (all, column, numeric, sign) => {
    if (!numeric) return (a, b) => sign * (collator.compare(all[a][column], all[b][column]) || a - b);
    const values = all.map((row) => parseFloat(row[column]));
    return (a, b) => {
      const [x, y] = [values[a], values[b]];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b;
      return sign * (x - y || b - a);
    };
  };

  const start = (holder, n) => {
    const table = holder.querySelector("table");
    const heads = [...table.tHead.rows[0].cells];
    const classes = heads.map((head) => head.className);
    const titles = heads.map((head) => head.textContent);
    const all = rowsOf(table, holder.querySelector('script[type="application/json"]'));
    const names = all.map((row) => row[NAME].toLowerCase());
    let page = 0, matching = []; // indices into `all`

    const filter = element("input", { type: "search", placeholder: "words in the name", spellcheck: false });
    const kind = element("select", {}, element("option", { value: "", textContent: "all" }));
    for (const value of new Set(all.map((row) => row[KIND]))) {
      kind.append(element("option", { value, textContent: value }));
    }
    const back = element("button", { type: "button", textContent: "Previous" });
    const on = element("button", { type: "button", textContent: "Next" });
    const status = element("span");
    status.setAttribute("role", "status");
    const labels = [element("label", {}, "Filter ", filter), element("label", {}, "Kind ", kind)];
    const controls = element("div", { className: "controls" }, ...labels, back, on, status);

    const draw = () => {
      const pages = Math.max(1, Math.ceil(matching.length / PAGE));
      page = Math.min(Math.max(page, 0), pages - 1);
      const shown = matching.slice(page * PAGE, (page + 1) * PAGE);
      table.tBodies[0].replaceChildren(
        ...shown.map((index) => {
          const cells = all[index].map((textContent, i) => element("td", { className: classes[i], textContent }));
          return element("tr", {}, ...cells);
        })
      );
      const position = pages > 1 ? `, page ${page + 1} of ${pages}` : "";
      status.textContent = `${matching.length} of ${all.length} tensors${position}`;
      back.disabled = page === 0;
      on.disabled = page === pages - 1;
      back.hidden = on.hidden = pages === 1;
    };

    const apply = () => {
      const words = recall("filter", n).toLowerCase().split(/\s+/).filter(Boolean);
      const only = recall("kind", n);
      const sort = recall("sort", n);
      const column = titles.indexOf(sort.replace(/^-/, ""));
      filter.value = recall("filter", n);
      kind.value = only;
      const matches = (i) => (!only || all[i][KIND] === only) && words.every((word) => names[i].includes(word));
      matching = [...all.keys()].filter(matches);
      if (column >= 0) {
        // The column 'differing' is aligned as text, because it may contain a reason, but it is sorted as a number.
        const numeric = column > KIND + 1;
        matching.sort(compare(all, column, numeric, sort.startsWith("-") ? -1 : 1));
      }
      heads.forEach((head, i) => {
        const direction = i !== column ? "none" : sort.startsWith("-") ? "descending" : "ascending";
        head.setAttribute("aria-sort", direction);
      });
      page = 0;
      draw();
    };

    heads.forEach((head, i) => {
      const button = element("button", { type: "button", textContent: titles[i] });
      button.title = "Sort; click a third time to restore the order, worst first";
      button.addEventListener("click", () => {
        const [first, second] = i > KIND + 1 ? ["-" + titles[i], titles[i]] : [titles[i], "-" + titles[i]];
        const sort = recall("sort", n);
        remember("sort", n, sort === first ? second : sort === second ? "" : first);
        apply();
      });
      head.replaceChildren(button);
    });
    filter.value = recall("filter", n);
    filter.addEventListener("input", () => (remember("filter", n, filter.value), apply()));
    kind.addEventListener("change", () => (remember("kind", n, kind.value), apply()));
    back.addEventListener("click", () => (page--, draw()));
    on.addEventListener("click", () => (page++, draw()));
    addEventListener("hashchange", apply);
    for (const note of holder.querySelectorAll(".unscripted")) note.remove();
    holder.prepend(controls);
    apply();
  };

  // One chart contains the histograms of all tensors; CSS hides all but the selected one.
  const select = (holder, n) => {
    const drawn = [...holder.querySelectorAll("g.histogram")];
    if (!drawn.length) return;
    const rows = [...holder.querySelector("tbody").rows].map((row) => [...row.cells].map((cell) => cell.textContent));
    const options = rows.map(([name], value) => element("option", { value, textContent: name }));
    const choice = element("select", {}, ...options);
    const line = holder.querySelector(".selected");
    const show = () => {
      const at = Math.max(0, rows.findIndex(([name]) => name === recall("histogram", n)));
      const [name, differing, maxAbs] = rows[at];
      choice.value = at;
      drawn.forEach((each, i) => each.classList.toggle("chosen", i === at));
      line.textContent = `${name}: differing elements: ${differing}; max abs: ${maxAbs}`;
    };
    choice.addEventListener("change", () => (remember("histogram", n, rows[choice.value][0]), show()));
    addEventListener("hashchange", show);
    holder.prepend(element("div", { className: "controls" }, element("label", {}, "Tensor ", choice)));
    show();
  };

  document.querySelectorAll("div.histograms").forEach((holder, i) => select(holder, i + 1));
  document.querySelectorAll("div.tensors").forEach((holder, i) => start(holder, i + 1));
})();
