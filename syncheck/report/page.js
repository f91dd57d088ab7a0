// Adds to a report page: charts, a slider for the steps, sorting, filters, pages of rows, links to tensors and buttons
// that copy. Without JavaScript the page shows the verdict, the findings and the worst rows of each table.
// Texts are inserted with textContent only, so no name in a checkpoint can become markup.
"use strict";
(async () => {
  const PAGE = 200; // rows per page, because 50,000 would make the browser slow
  const MOST_BARS = 60; // rows of a chart of differences
  const FEWEST_MODULES = 8; // rows of a chart whose tensors share rows by module, otherwise in equal parts
  const FEW = 5; // rows of a table that needs no filter, and the first rows of a folded table
  const NARROW = 600; // pixels; a narrower chart has the names of its bars above them
  const NAME = 0, KIND = 1, FIRST_NUMBER = 3;
  const UNKNOWN = -1; // see page_data.py
  const COUNTERS = ["bn_count", "optimizer_step"]; // their differences are steps, on another scale
  // Okabe and Ito's palette, which most color-blind readers can distinguish, without its yellow and black.
  const COLORS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
  // viridis without its darkest part, which is invisible on a dark page.
  const SCALE = ["#414487", "#2a788e", "#22a884", "#7ad151", "#fde725"];

  const element = (tag, properties = {}, ...children) => {
    const { className, ...rest } = properties;
    const made = document.createElement(tag);
    if (className) made.className = className;
    for (const [key, value] of Object.entries(rest)) key in made ? (made[key] = value) : made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const button = (text, title, action) => {
    const made = element("button", { type: "button", textContent: text, title });
    made.addEventListener("click", action);
    return made;
  };
  const breakable = (name) => name.split(/(?<=[./])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));
  const debounce = (action) => {
    let timer;
    return () => (clearTimeout(timer), (timer = setTimeout(action, 100)));
  };

  // The fragment of the URL stores the view, so that a link opens the same view.
  // 'filter=bn1' applies to every run of the page, 'filter2=bn1' to the second.
  const view = () => new URLSearchParams(location.hash.slice(1));
  const recall = (key, n) => view().get(key + n) ?? view().get(key) ?? "";
  const remember = (key, n, value) => {
    if (recall(key, n) === value) return;
    const next = new URLSearchParams([...view()].filter(([, of]) => of !== "")); // without the anchor of a finding
    next.delete(key + n);
    if ((next.get(key) ?? "") !== value) next.set(key + n, value);
    try {
      history.replaceState(null, "", "#" + next);
    } catch {
      // An embedded page may not change its URL; the page works without it.
    }
  };
  const linkTo = (n, name) => `#${new URLSearchParams([["tensor" + n, name]])}`;

  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  };

  // Sorts by the displayed text: '12 of 64' as 12, '1.5e-07' and '41.00%' as numbers, texts without a number last. Equal
  // texts keep their order, or its reverse, so that ascending is always descending backwards.
  const collator = new Intl.Collator("en", { numeric: true }); // layers.2 before layers.10
  const comparison = (cells, numeric, sign) => {
    if (!numeric) return (a, b) => sign * (collator.compare(cells[a], cells[b]) || a - b);
    const values = cells.map((cell) => parseFloat(cell));
    return (a, b) => {
      const [x, y] = [values[a], values[b]];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b;
      return sign * (x - y || b - a);
    };
  };
  const sortButtons = (heads, numeric, choose) =>
    heads.forEach((head, i) => {
      const title = head.textContent;
      const tip = "Sort; click a third time to restore the order";
      head.replaceChildren(button(title, tip, () => choose(i, numeric(i) ? ["-", ""] : ["", "-"])));
      head.setAttribute("aria-sort", "none");
    });
  const markSorted = (heads, column, sign) =>
    heads.forEach((head, i) =>
      head.setAttribute("aria-sort", i !== column ? "none" : sign === "-" ? "descending" : "ascending")
    );

  // Any table without controls of its own: sorts its rows.
  const makeSortable = (table) => {
    const heads = [...table.tHead.rows[0].cells], rows = [...table.tBodies[0].rows];
    if (rows.length < 2) return;
    let sorted = [-1, ""];
    const isNumber = (i) => heads[i].classList.contains("number");
    sortButtons(heads, isNumber, (i, [first, second]) => {
      const [column, sign] = sorted;
      sorted = column !== i ? [i, first] : sign === first ? [i, second] : [-1, ""];
      const order = [...rows.keys()];
      if (sorted[0] >= 0) {
        order.sort(comparison(rows.map((row) => row.cells[i].textContent), isNumber(i), sorted[1] ? -1 : 1));
      }
      table.tBodies[0].append(...order.map((index) => rows[index]));
      markSorted(heads, ...sorted);
    });
  };

  const makeCopyable = (code) => {
    const content = code.textContent;
    const copy = button("", `Copy ${content}`, async () => {
      try {
        await navigator.clipboard.writeText(content);
        copy.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code); // a page without the right to copy selects the code instead
        copy.textContent = "Selected";
      }
      setTimeout(() => (copy.textContent = ""), 2000);
    });
    Object.assign(copy, { className: "copy", ariaLabel: copy.title });
    code.after(copy);
  };

  // -- charts

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = [];
  const redrawAll = () => drawn.forEach((chart) => chart.redraw());
  const colors = () => {
    const style = getComputedStyle(document.documentElement);
    return { text: style.getPropertyValue("--text"), edge: style.getPropertyValue("--edge") };
  };

  // A chart draws itself when it becomes visible, and again if the size or the colors of the page change.
  // option: returns the option of ECharts. height: of the chart in pixels, a number or a function.
  const makeChart = (holder, label, height, option, clicked) => {
    const box = element("div", { className: "chart", role: "img", "aria-label": label });
    let instance = null;
    const redraw = () => {
      if (!box.clientWidth) return;
      box.style.height = `${typeof height === "function" ? height() : height}px`;
      const { text, edge } = colors();
      if (!instance) {
        instance = echarts.init(box, null, { renderer: "canvas" });
        if (clicked) instance.on("click", clicked);
      } else instance.resize();
      instance.setOption(
        {
          animation: false,
          color: COLORS,
          textStyle: { color: text, fontFamily: "system-ui, sans-serif" },
          aria: { enabled: true, label: { description: label } },
          grid: { left: 8, right: 16, top: 36, bottom: 8, containLabel: true },
          ...option(text, edge),
        },
        true
      );
    };
    holder.append(box);
    new ResizeObserver(debounce(redraw)).observe(box);
    drawn.push({ redraw });
    redraw();
    return redraw;
  };
  const tip = (...lines) => element("div", { className: "tip" }, ...lines.map((line) => element("div", {}, line)));
  const axis = (text, edge, more) => ({
    nameTextStyle: { color: text }, axisLabel: { color: text }, axisLine: { lineStyle: { color: edge } },
    splitLine: { lineStyle: { color: edge, opacity: 0.3 } }, ...more,
  });
  const number = (value) => (value === 0 ? "0" : value === UNKNOWN || value === null ? "unknown" : value.toPrecision(4) * 1 + "");

  // Lines over steps. lines: {label: [[step, value or null], ...]}. A logarithmic axis has a place for zero at its
  // bottom, because "in sync" is the most important value.
  const lineChart = (holder, label, lines, chosen, choose) => {
    const values = Object.values(lines).flatMap((points) => points.map(([, value]) => value)).filter((value) => value > 0);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const logarithmic = high > 100 * low;
    const floor = logarithmic ? 10 ** (Math.floor(Math.log10(low)) - 1) : 0;
    const shown = (value) => (logarithmic && value === 0 ? floor : value);
    const steps = [...new Set(Object.values(lines).flatMap((points) => points.map(([step]) => step)))];
    const several = Object.keys(lines).length > 1; // the heading names a single line
    const ticks = steps.length > 16 ? {} : { customValues: steps };
    return makeChart(
      holder, label, 280,
      (text, edge) => ({
        grid: { left: 8, right: 24, top: several ? 56 : 32, bottom: steps.length > 30 ? 48 : 24, containLabel: true },
        legend: { show: several, type: "scroll", textStyle: { color: text }, top: 0 },
        tooltip: {
          trigger: "axis",
          formatter: (points) =>
            tip(`step ${points[0].axisValue}`, ...points.map((p) => `${p.seriesName}: ${number(p.data[2])}`)),
        },
        dataZoom: steps.length > 30 ? [{ type: "inside" }, { type: "slider", height: 20, bottom: 4 }] : [],
        xAxis: axis(text, edge, {
          type: "value", name: "step", nameLocation: "middle", nameGap: 24, minInterval: 1, min: "dataMin", max: "dataMax",
          axisTick: ticks, axisLabel: { color: text, hideOverlap: true, ...ticks }, splitLine: { show: false },
        }),
        yAxis: axis(text, edge, {
          type: logarithmic ? "log" : "value", min: floor, name: "max abs difference", nameLocation: "end",
          nameTextStyle: { color: text, align: "left" },
          axisLabel: { color: text, formatter: (value) => (logarithmic && value <= floor * 1.01 ? "0" : number(value)) },
        }),
        series: Object.entries(lines).map(([name, points], i) => ({
          name, type: "line", symbolSize: 7,
          data: points.map(([step, value]) => [step, value === null ? null : shown(value), value]),
          markLine: i || !chosen ? undefined : {
            silent: true, symbol: "none", label: { show: false }, lineStyle: { color: text }, data: [{ xAxis: chosen() }],
          },
        })),
      }),
      choose && ((event) => choose(event.data[0]))
    );
  };

  // The rows of a chart of tensors from one position to another: first, last, and whether the row is a module. Tensors of
  // one module share a row if there are too many tensors, or equal parts of them if no modules have the right size.
  const divide = (names, from, to) => {
    const count = to - from;
    if (count <= MOST_BARS) return Array.from({ length: count }, (_, i) => [from + i, from + i + 1, false]);
    const parts = names.map((name) => name.split("."));
    let starts = [];
    for (let depth = 1; ; depth++) {
      const isFirst = (i) => i === from || parts[i].slice(0, depth).join(".") !== parts[i - 1].slice(0, depth).join(".");
      const finer = Array.from({ length: count }, (_, i) => from + i).filter(isFirst);
      if (finer.length > MOST_BARS || depth > 32) break;
      starts = finer;
    }
    const areModules = starts.length >= FEWEST_MODULES;
    if (!areModules) {
      starts = Array.from({ length: MOST_BARS }, (_, i) => from + Math.round((i * count) / MOST_BARS));
    }
    return starts.map((start, i) => [start, starts[i + 1] ?? to, areModules]);
  };
  const commonName = (a, b) => {
    const [parts, rest] = [a.split("."), b.split(".")];
    let same = 0;
    while (same < parts.length && parts[same] === rest[same]) same++;
    return parts.slice(0, same).join(".");
  };
  // A name of at most so many characters. Words lose their ends first, because numbers distinguish layers.
  const shorten = (name, most) => {
    let result = name;
    for (let letters = 12; letters > 2 && result.length > most; letters--) {
      result = name.replace(/[a-z]+/gi, (word) => (word.length > letters + 1 ? `${word.slice(0, letters)}\u2026` : word));
    }
    const half = Math.floor(most / 2) - 1;
    return result.length <= most ? result : `${result.slice(0, half)}\u2026${result.slice(-half)}`;
  };
  // Two lines, divided at the last dot that leaves a first line of at most so many characters.
  const wrap = (name, most) => {
    const dot = name.lastIndexOf(".", most - 1);
    return name.length <= most || dot < 0 ? name : `${name.slice(0, dot + 1)}\n${name.slice(dot + 1)}`;
  };
  const powers = (values) => {
    const known = values.filter((value) => value > 0).map(Math.log10);
    const low = known.length ? Math.ceil(Math.min(...known)) - 1 : -3; // the smallest difference is visible too
    return [low, known.length ? Math.max(Math.ceil(Math.max(...known)), low + 1) : low + 1];
  };
  const NO_NUMBER = "no number: missing, another shape, not finite on some ranks, or compared by digest";
  const scaleTitle = "Largest absolute difference in a tensor, in units of its values";

  // The differences of tensors in the order of the model: a map by ranks, or bars for two replicas or models. A row of
  // several tensors shows the largest difference; a click on it, the wheel and the buttons zoom.
  const differenceChart = (holder, run, rowsOf, select) => {
    let rows = [], from = 0, to = 0, bars = [];
    const isMap = run.axis !== "";
    const status = element("span", { role: "status" });
    const describe = ([first, last, isModule]) => {
      const [a, b] = [rows[first].name, rows[last - 1].name];
      if (last - first === 1) return a;
      return `${(isModule && commonName(a, b)) || `${a} to ${b}`} (${last - first})`;
    };
    const isWorse = ([value, kind], old) => {
      if (!old) return true;
      const [isCounter, wasCounter] = [kind, old[1]].map((each) => COUNTERS.includes(each));
      if (isCounter !== wasCounter) return wasCounter;
      return value === UNKNOWN || (old[0] !== UNKNOWN && value > old[0]);
    };
    // [column, row, difference, kind] of the worst tensor of each row, in each column
    const aggregate = () =>
      bars.flatMap(([first, last], i) => {
        const worst = new Map();
        for (const { value, at, kind } of rows.slice(first, last)) {
          for (const column of at) if (isWorse([value, kind], worst.get(column))) worst.set(column, [value, kind]);
        }
        return [...worst].map(([column, [value, kind]]) => [column, i, value, kind]);
      });
    const zoom = (a, b) => {
      from = Math.max(0, Math.min(a, rows.length - 1));
      to = Math.min(rows.length, Math.max(b, from + 1));
      bars = divide(rows.map(({ name }) => name), from, to);
      controls.hidden = rows.length <= MOST_BARS; // all tensors have a row
      status.textContent = rows.length ? `${to - from} of ${rows.length} tensors` : "";
      empty.hidden = rows.length > 0;
      chart.hidden = scale.hidden = rows.length === 0;
      redraw();
    };
    const around = (share) => {
      const [middle, half] = [(from + to) / 2, Math.max(1, ((to - from) * share) / 2)];
      zoom(Math.round(middle - half), Math.round(middle + half));
    };
    const move = (sign) => {
      const by = sign * Math.max(1, Math.round((to - from) / 2));
      if (from + by >= 0 && to + by <= rows.length) zoom(from + by, to + by);
      else sign < 0 ? zoom(0, to - from) : zoom(rows.length - (to - from), rows.length);
    };
    const controls = element(
      "div", { className: "controls" },
      button("Zoom in", "Show half of the tensors", () => around(0.5)),
      button("Zoom out", "Show twice as many tensors", () => around(2)),
      button("Up", "Move towards the first tensor", () => move(-1)),
      button("Down", "Move towards the last tensor", () => move(1)),
      button("All", "Show all tensors", () => zoom(0, rows.length)), status
    );
    const empty = element("p", { className: "note", textContent: "no difference at this step" });
    const scale = element("div", { className: "scale" });
    const chart = element("div");
    holder.append(controls, empty, scale, chart);
    const isNarrow = () => holder.clientWidth < NARROW;
    // A narrow map has names in two lines. A narrow chart of bars has them above the bars, which then have all the width.
    const label = (name) => (!isNarrow() ? shorten(name, 56) : isMap ? wrap(shorten(name, 52), 28) : shorten(name, 54));
    const aboveBars = { inside: true, align: "left", verticalAlign: "bottom", margin: 0, padding: [0, 0, 7, 0] };
    const tensorAxis = (text, edge) => axis(text, edge, {
      type: "category", inverse: true, data: bars.map(describe), axisTick: { show: false }, z: 3,
      axisLabel: {
        color: text, fontSize: isNarrow() ? 11 : 12, lineHeight: 13, interval: 0, formatter: label, ...(isNarrow() && !isMap ? aboveBars : {}),
      },
    });
    const rowHeight = () => (!isNarrow() ? 18 : isMap ? 28 : 32);
    const swatch = (color, text) => element("span", {}, element("span", { className: "swatch", style: `background: ${color}` }), ` ${text}`);
    // The scale of the colors above the map, with a title and a unit.
    const describeScale = (low, high, cells) => {
      const colors = element("span", { className: "colors", style: `background: linear-gradient(to right, ${SCALE})` });
      const hasUnknown = cells.some(([, , value]) => value === UNKNOWN);
      scale.replaceChildren(
        element("span", {}, `${scaleTitle} (log scale): `), element("span", {}, `1e${low} `, colors, ` 1e${high}`),
        ...(hasUnknown ? [swatch(COLORS[0], NO_NUMBER)] : [])
      );
    };
    const drawMap = (text, edge, cells, [low, high]) => ({
      grid: { left: 8, right: 16, top: 8, bottom: 32, containLabel: true },
      xAxis: axis(text, edge, {
        type: "category", data: run.columns, name: run.axis, nameLocation: "middle", nameGap: 28,
        nameTextStyle: { color: text, fontSize: 12 }, axisLabel: { color: text, fontSize: 12, hideOverlap: true },
      }),
      yAxis: tensorAxis(text, edge),
      tooltip: {
        confine: true,
        formatter: ({ data }) =>
          tip(describe(bars[data.value[1]]), `${run.axis} ${run.columns[data.value[0]]}`, `max abs: ${number(data.raw)}`),
      },
      visualMap: { show: false, min: low, max: high, dimension: 2, inRange: { color: SCALE } },
      series: {
        type: "heatmap", itemStyle: { borderWidth: 1, borderColor: edge },
        data: cells.map(([column, row, raw]) =>
          raw === UNKNOWN
            ? { value: [column, row, low], raw, visualMap: false, itemStyle: { color: COLORS[0] } }
            : { value: [column, row, Math.log10(raw)], raw }
        ),
      },
    });
    const drawBars = (text, edge, cells, [low, high]) => {
      const kindOf = ([, , raw, kind]) => (raw === UNKNOWN ? "no number" : kind);
      const kinds = [...new Set(cells.map(kindOf))];
      const colorOf = (kind, i) => (kind === "no number" ? COLORS[0] : COLORS[1 + (i % (COLORS.length - 1))]);
      const length = (raw) => (raw === UNKNOWN ? high - low : Math.log10(raw) - low);
      scale.replaceChildren(...(kinds.length > 1 ? kinds.map((kind, i) => swatch(colorOf(kind, i), kind)) : []));
      // The last label stands one interval after the one before.
      const interval = Math.ceil((high - low) / (isNarrow() ? 4 : 8));
      return {
        grid: { left: 8, right: 24, top: 44, bottom: 8, containLabel: true },
        xAxis: axis(text, edge, {
          type: "value", position: "top", min: 0, max: interval * Math.ceil((high - low) / interval), interval,
          name: "max abs difference (log scale)", nameLocation: "middle", nameGap: 24,
          nameTextStyle: { color: text, fontSize: 12 },
          axisLabel: { color: text, fontSize: 12, formatter: (power) => `1e${low + power}` },
        }),
        yAxis: tensorAxis(text, edge),
        tooltip: { confine: true, formatter: ({ data }) => tip(describe(bars[data.value[1]]), data.kind, `max abs: ${number(data.raw)}`) },
        series: kinds.map((kind, i) => ({
          name: kind, type: "bar", stack: "tensors", barWidth: isNarrow() ? 10 : "70%",
          itemStyle: { color: colorOf(kind, i) },
          data: cells.filter((cell) => kindOf(cell) === kind)
            .map(([, row, raw, of]) => ({ value: [length(raw), row], raw, kind: of })),
        })),
      };
    };
    const redraw = makeChart(
      chart, `${scaleTitle}, in the order of the model`, () => (isMap ? 90 : 86) + rowHeight() * Math.max(2, bars.length),
      (text, edge) => {
        const cells = aggregate();
        const range = powers(cells.map(([, , value]) => value));
        if (isMap) describeScale(...range, cells);
        return (isMap ? drawMap : drawBars)(text, edge, cells, range);
      },
      ({ data }) => {
        const [first, last] = bars[data.value[1]];
        last - first > 1 ? zoom(first, last) : select(rows[first].name);
      }
    );
    chart.addEventListener(
      "wheel",
      (event) => event.ctrlKey && (event.preventDefault(), around(event.deltaY < 0 ? 0.7 : 1.4)), { passive: false }
    );
    return () => {
      const whole = from === 0 && to === rows.length;
      rows = rowsOf();
      whole || to > rows.length ? zoom(0, rows.length) : zoom(from, to);
    };
  };

  const histogram = (holder, { bins, rows }, n) => {
    const options = rows.map(([name], value) => element("option", { value, textContent: name }));
    const choice = element("select", {}, ...options);
    holder.append(element("div", { className: "controls" }, element("label", {}, "Tensor ", choice)));
    // Logarithmic, with one element at height 1, so that bars stand on the axis of no element.
    const height = (count) => (count ? Math.log10(count) + 1 : 0);
    const at = () => Math.max(0, rows.findIndex(([name]) => name === recall("histogram", n)));
    const draw = makeChart(holder, "Number of elements by absolute difference", 260, (text, edge) => {
      const [name, ...elements] = rows[at()];
      const total = elements.reduce((sum, count) => sum + count, 0);
      // The bins from the first to the last with an element of this tensor, between those of equal and of no number.
      const last = elements.length - 1;
      const used = elements.map((count, i) => (count && i && i < last ? i : 0)).filter(Boolean);
      const isShown = (_, i) => i === 0 || i === last || (i >= used[0] && i <= used.at(-1));
      const [counts, titles] = [elements, bins].map((list) => list.filter(isShown));
      const interval = holder.clientWidth < NARROW ? Math.ceil(titles.length / 8) - 1 : 0;
      return {
        tooltip: { formatter: ({ dataIndex }) => tip(name, titles[dataIndex], `${counts[dataIndex]} of ${total} elements`) },
        xAxis: axis(text, edge, { type: "category", data: titles, axisLabel: { color: text, fontSize: 12, interval, rotate: 30 } }),
        yAxis: axis(text, edge, {
          type: "value", min: 0, minInterval: 1, name: "elements (log scale)", nameTextStyle: { color: text, align: "left" },
          axisLabel: { color: text, fontSize: 12, formatter: (power) => (power ? `${10 ** (power - 1)}` : "0") },
        }),
        series: { type: "bar", barWidth: "90%", itemStyle: { color: COLORS[1] }, data: counts.map(height) },
      };
    });
    const show = () => ((choice.value = at()), draw());
    choice.addEventListener("change", () => (remember("histogram", n, rows[choice.value][0]), show()));
    addEventListener("hashchange", show);
    show();
    return (name) => rows.some(([of]) => of === name) && (remember("histogram", n, name), show());
  };

  // Where two models store a tensor: both as planes of rows and columns, divided into the boxes of their files.
  const shardMap = (holder, stored, n) => {
    const choice = element("select", {}, ...stored.map(({ name }, value) => element("option", { value, textContent: name })));
    holder.append(element("div", { className: "controls" }, element("label", {}, "Tensor ", choice)));
    const at = () => Math.max(0, stored.findIndex(({ name }) => name === recall("shards", n)));
    const describe = (of, label) => {
      if (!of) return [`${label}: absent`];
      const unknown = of.unknown ? `, ${of.unknown} parts at an unknown position` : "";
      const dims = of.dims.length ? `, dimensions ${of.dims.join(" and ")}` : "";
      return [`${label}: `, element("code", {}, ...breakable(of.name)), ` ${of.type}${dims}${unknown}`];
    };
    const planes = [0, 1].map((side) => {
      const title = element("p", { className: "note" });
      const plane = element("div", { className: "plane" }, title);
      holder.append(plane);
      const draw = makeChart(plane, `Shards of model ${"AB"[side]}`, 220, (text, edge) => {
        const of = stored[at()].sides[side];
        title.replaceChildren(...describe(of, "AB"[side]));
        if (!of || !of.boxes.length) return { series: [] };
        const flat = of.plane.length === 1; // one row
        const [height, width] = flat ? [1, of.plane[0]] : of.plane;
        const holders = [...new Set(of.boxes.map((box) => box[box.length - 1]))];
        const boxes = of.boxes.map((box) => (flat ? [0, box[0], 1, box[1], box[2]] : box));
        // The axes have the sizes and the bounds of the parts.
        const bounded = (i, size) => {
          const bounds = [...new Set([0, ...boxes.map((box) => box[i] + box[i + 2]), size])];
          const ticks = { customValues: bounds.sort((a, b) => a - b) };
          return { axisTick: ticks, axisLabel: { color: text, fontSize: 12, hideOverlap: true, ...ticks } };
        };
        const mark = of.worst && (flat ? [0, of.worst[0]] : of.worst);
        return {
          grid: { left: 8, right: 16, top: 8, bottom: 8, containLabel: true },
          tooltip: {
            confine: true,
            formatter: ({ data }) =>
              tip(data.value[4] ?? "largest difference", `rows from ${data.value[0]}, columns from ${data.value[1]}`),
          },
          xAxis: axis(text, edge, { type: "value", min: 0, max: width || 1, minInterval: 1, ...bounded(1, width) }),
          yAxis: axis(text, edge, { type: "value", min: 0, max: height || 1, inverse: true, minInterval: 1, ...bounded(0, height) }),
          series: [
            {
              type: "custom", encode: { x: 1, y: 0 },
              data: boxes.map((value) => ({ value })),
              renderItem: (_, api) => {
                const [row, column, rows, columns] = [0, 1, 2, 3].map((i) => api.value(i));
                const [x, y] = api.coord([column, row]);
                const [right, bottom] = api.coord([column + columns, row + rows]);
                const owner = boxes[_.dataIndex][4];
                return {
                  type: "rect", shape: { x, y, width: Math.max(1, right - x), height: Math.max(1, bottom - y) },
                  style: { fill: COLORS[holders.indexOf(owner) % COLORS.length], stroke: edge, opacity: 0.8 },
                  textContent: { style: { text: bottom - y > 14 ? owner : "", fill: text, overflow: "truncate", width: Math.max(0, right - x - 4) } },
                  textConfig: { position: "inside" },
                };
              },
            },
            ...(mark ? [{ type: "custom", encode: { x: 1, y: 0 }, data: [{ value: [mark[0] + 0.5, mark[1] + 0.5] }],
              renderItem: (_, api) => {
                const [x, y] = api.coord([api.value(1), api.value(0)]);
                return { type: "circle", shape: { cx: x, cy: y, r: 6 }, style: { fill: "none", stroke: text, lineWidth: 2 } };
              } }] : []),
          ],
        };
      });
      return draw;
    });
    const show = () => ((choice.value = at()), planes.forEach((draw) => draw()));
    choice.addEventListener("change", () => (remember("shards", n, stored[choice.value].name), show()));
    addEventListener("hashchange", show);
    show();
    return (name) => stored.some((each) => each.name === name) && (remember("shards", n, name), show());
  };

  const nameMap = (holder, stored) => {
    const rows = stored.map(({ name, sides }) => [name, ...sides.map((side) => (side ? `${side.name} ${side.type}` : "absent"))]);
    const head = ["tensor", "stored in A", "stored in B"].map((title) => element("th", { scope: "col", textContent: title }));
    const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", { className: "name" }, ...breakable(cell)))));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
    const wide = element("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "names in both models" }, table);
    holder.append(wide);
    makeSortable(table);
    if (rows.length <= FEW) return;
    table.className = "few"; // the style of the page hides the rows after the first
    const show = () => ((table.className = ""), more.remove());
    const more = button(`Show ${rows.length - FEW} more tensors`, "Show all rows of the table", show);
    holder.append(element("div", { className: "controls" }, more));
  };

  // -- the table of tensors of a run, for the chosen step

  const tensorTable = (holder, n, isShort, rowsOf, selected) => {
    const table = holder.querySelector("table");
    const heads = [...table.tHead.rows[0].cells];
    const classes = heads.map((head) => head.className), titles = heads.map((head) => head.textContent);
    let all = [], page = 0, matching = []; // indices into `all`
    const filter = element("input", { type: "search", placeholder: "words in the name", spellcheck: false });
    const kind = element("select");
    const back = button("Previous", "Previous page of rows", () => (page--, draw()));
    const on = button("Next", "Next page of rows", () => (page++, draw()));
    const status = element("span", { role: "status" });
    const kindLabel = element("label", {}, "Kind ", kind);
    const controls = element("div", { className: "controls" }, element("label", {}, "Filter ", filter), kindLabel, back, on, status);
    holder.prepend(controls);

    const makeRow = (index) => {
      const cells = all[index].map((cell, i) =>
        element("td", { className: classes[i] }, ...(i === NAME ? [element("a", { href: linkTo(n, cell) }, ...breakable(cell))] : [cell]))
      );
      return element("tr", { className: all[index][NAME] === recall("tensor", n) ? "chosen" : "" }, ...cells);
    };
    const draw = () => {
      const pages = Math.max(1, Math.ceil(matching.length / PAGE));
      page = Math.min(Math.max(page, 0), pages - 1);
      table.tBodies[0].replaceChildren(...matching.slice(page * PAGE, (page + 1) * PAGE).map(makeRow));
      const position = pages > 1 ? `, page ${page + 1} of ${pages}` : "";
      status.textContent = `${matching.length} of ${all.length} tensors${position}`;
      back.disabled = page === 0;
      on.disabled = page === pages - 1;
      back.hidden = on.hidden = pages === 1;
    };
    const apply = () => {
      const words = recall("filter", n).toLowerCase().split(/\s+/).filter(Boolean);
      const only = recall("kind", n), sort = recall("sort", n), sign = sort.startsWith("-") ? "-" : "";
      const column = titles.indexOf(sort.replace(/^-/, ""));
      const kinds = ["", ...new Set(all.map((row) => row[KIND]))];
      kind.replaceChildren(...kinds.map((value) => element("option", { value, textContent: value || "all" })));
      kindLabel.hidden = kinds.length < 3; // all tensors have one kind
      controls.hidden = isShort && !recall("filter", n) && !only;
      filter.value = recall("filter", n);
      kind.value = only;
      const matches = (row) => (!only || row[KIND] === only) && words.every((word) => row[NAME].toLowerCase().includes(word));
      matching = [...all.keys()].filter((i) => matches(all[i]));
      if (column >= 0) {
        // The column 'differing' is aligned as text, because it may contain a reason, but it is sorted as a number.
        matching.sort(comparison(all.map((row) => row[column]), column >= FIRST_NUMBER, sign ? -1 : 1));
      }
      markSorted(heads, column, sign);
      page = Math.max(0, Math.floor(matching.findIndex((i) => all[i][NAME] === recall("tensor", n)) / PAGE));
      draw();
    };
    sortButtons(heads, (i) => i >= FIRST_NUMBER, (i, signs) => {
      const [first, second] = signs.map((sign) => sign + titles[i]), sort = recall("sort", n);
      remember("sort", n, sort === first ? second : sort === second ? "" : first);
      apply();
    });
    const scroll = () => {
      const row = table.querySelector("tr.chosen");
      if (!row) return;
      row.closest("details").open = true;
      row.scrollIntoView({ block: "center" });
      selected(recall("tensor", n));
    };
    filter.addEventListener("input", () => (remember("filter", n, filter.value), apply()));
    kind.addEventListener("change", () => (remember("kind", n, kind.value), apply()));
    addEventListener("hashchange", () => (apply(), scroll()));
    for (const note of holder.querySelectorAll(".unscripted")) note.remove();
    const refresh = () => ((all = rowsOf()), apply());
    refresh();
    setTimeout(scroll);
    return refresh;
  };

  const part = (holder, title) => {
    const body = element("div", { className: "part" });
    holder.append(element("h3", { textContent: title }), body);
    return body;
  };

  const startRun = (section, run, n) => {
    const charts = section.querySelector(".charts"), tensors = section.querySelector(".tensors");
    const steps = run.steps;
    let at = steps.length - 1;
    const refreshed = [], selected = [];
    const select = (name) => selected.forEach((action) => action(name));
    const texts = ([name, ...rest]) => [run.names[name], ...rest.slice(0, -2).map((index) => run.texts[index])];
    const goTo = (index) => {
      at = Math.max(0, Math.min(index, steps.length - 1));
      remember("step", n, at === steps.length - 1 ? "" : String(steps[at].step));
      refreshed.forEach((refresh) => refresh());
    };
    const asked = () => {
      const wanted = recall("step", n);
      const index = wanted === "" ? -1 : steps.findIndex(({ step }) => String(step) === wanted);
      return index < 0 ? steps.length - 1 : index;
    };
    at = asked();
    if (steps.length > 1 && run.names.length) {
      const slider = element("input", { type: "range", min: 0, max: steps.length - 1, step: 1 });
      const output = element("output");
      slider.addEventListener("input", () => goTo(+slider.value));
      charts.append(element("div", { className: "controls slider" }, element("label", {}, "Step ", slider), output));
      refreshed.push(() => {
        slider.value = at;
        const { step, rows, omitted, identical } = steps[at];
        const count = rows.length + omitted;
        output.textContent = `${step}: ${count} of ${count + identical} tensors are not identical`;
        slider.setAttribute("aria-valuetext", `step ${output.textContent}`);
      });
    }
    const curves = Object.keys(run.curves);
    if (curves.length) {
      const nearest = (step) => steps.reduce((best, each, i) => (Math.abs(each.step - step) < Math.abs(steps[best].step - step) ? i : best), 0);
      const body = part(charts, `${curves.length > 1 ? "Findings" : curves[0]} over the steps`);
      const draw = lineChart(body, "Largest difference of each finding by step", run.curves, () => steps[at].step, (step) => goTo(nearest(step)));
      refreshed.push(draw);
    }
    // The table has the difference of a single tensor.
    if (run.names.length > 1) {
      const body = part(charts, run.axis ? "Where the differences are" : "Differences along the depth of the model");
      const rowsOf = () =>
        steps[at].rows
          .map((row) => ({
            position: row[NAME], name: run.names[row[NAME]], kind: run.texts[row[KIND]], value: row.at(-2), at: run.sets[row.at(-1)],
          }))
          .filter(({ value }) => value !== 0)
          .sort((a, b) => a.position - b.position);
      refreshed.push(differenceChart(body, run, rowsOf, (name) => (location.hash = linkTo(n, name))));
      body.append(element("p", {
        className: "note",
        textContent:
          (run.axis
            ? "Ranks that agree in all of these tensors share a column. A difference is shown on the ranks outside the " +
              "majority; without a majority, on all ranks that disagree. "
            : "") + "Tensors are in the order of the model; identical tensors are not shown.",
      }));
    }
    if (run.histograms.rows.length) selected.push(histogram(part(charts, "Distribution of differences over elements"), run.histograms, n));
    // Models that are stored whole, under equal names, have nothing to show here.
    const isDivided = ({ sides }) => sides.some((side) => side && (side.boxes.length > 1 || side.unknown));
    const isRenamed = ({ sides: [a, b] }) => a?.name !== b?.name || a?.type !== b?.type;
    if (run.stored.some(isDivided)) selected.push(shardMap(part(charts, "Shards"), run.stored, n));
    const renamed = run.stored.filter(isRenamed);
    if (renamed.length) nameMap(part(charts, "Names that differ between the models"), renamed);
    const count = steps[at].rows.length + steps[at].omitted + steps[at].identical;
    const limit = `The page has shards and names of ${run.stored.length} of ${count} tensors.`;
    if (run.stored.length && run.stored.length < count) charts.append(element("p", { className: "note" }, limit));
    if (tensors) {
      refreshed.push(tensorTable(tensors, n, steps.every(({ rows }) => rows.length <= FEW), () => steps[at].rows.map(texts), select));
      if (steps.some(({ omitted }) => omitted)) {
        const note = element("p", { className: "note" });
        tensors.append(note);
        refreshed.push(() => (note.textContent = steps[at].omitted ? `${steps[at].omitted} more tensors are not on this page; the JSON report lists all.` : ""));
      }
    }
    addEventListener("hashchange", () => asked() !== at && goTo(asked()));
    refreshed.forEach((refresh) => refresh());
  };

  // Code with a space is a command or a statement; other code is a name in a sentence.
  for (const code of document.querySelectorAll(".finding dd code")) if (/\s/.test(code.textContent)) makeCopyable(code);
  for (const table of document.querySelectorAll("table")) {
    if (!table.closest(".tensors")) makeSortable(table);
  }
  const holder = document.getElementById("data");
  const data = holder ? await unpack(holder.textContent) : { runs: [], drift: {} };
  const drift = document.getElementById("drift");
  if (drift && Object.values(data.drift).some((points) => points.length > 1)) {
    const body = element("div", { className: "part" });
    drift.querySelector("summary").after(body);
    lineChart(body, "Largest drift of running statistics by step", data.drift);
  }
  data.runs.forEach((run, i) => {
    const section = document.getElementById(`run${i + 1}`);
    let started = false;
    const start = () => {
      if (started || !section.open) return;
      started = true;
      startRun(section, run, i + 1);
    };
    section.addEventListener("toggle", () => (start(), redrawAll()));
    const openLinked = () => {
      if (["tensor", "step", "filter"].some((key) => view().get(key + (i + 1)))) section.open = true;
    };
    addEventListener("hashchange", openLinked);
    openLinked();
    start();
  });
  dark.addEventListener("change", redrawAll);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
  document.documentElement.dataset.ready = "yes"; // for tests
})();
