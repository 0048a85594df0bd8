// From the data of report/embedded.py to the two timelines: one step, and the whole run.

function stepModel(step) {
  const op = step.op, text = (column, i) => step.texts[op[column][i]];
  const end = op.begin.map((begin, i) => begin + op.time[i]);
  const phase = (i) => step.phases[op.phase[i]];
  const lanes = [barLane("phases", [spans(op, end, phase, phase)], 16)];
  const layers = layerRows(step, op, end, text);
  if (layers.length) lanes.push(barLane("layers", layers, 18));
  const ops = lanes.length;
  lanes.push(barLane("ops", [{
    begin: op.begin, end, current: true,
    colour: (i) => colour("c" + op.category[i]),
    label: (i) => text("name", i),
    mark: (i) => op.why[i] === 1,
  }], 32));
  const grouped = quantities(step.tracks);
  const powers = grouped.find((tracks) => tracks[0].quantity === "power");
  if (powers || step.energy) lanes.push(powerLane(step, op, end, powers || []));
  if (op.held.some((value) => value !== null)) lanes.push(heldLane(op, end));
  for (const tracks of grouped) {
    if (["utilisation", "process", "gpu", "memory"].includes(tracks[0].quantity)) lanes.push(trackLane(tracks));
  }
  const tip = (at) => opTip(step, op, end, at);
  return { span: step.span, unit: 1e-6, lanes, map: lanes[ops], op, end, tip, spanName: "step" };
}

/** Neighbours of the same name as one bar. */
function spans(op, end, nameOf, phaseOf) {
  const begin = [], stop = [], names = [], phases = [];
  for (let i = 0; i < op.begin.length; i++) {
    const name = nameOf(i);
    const last = names.length - 1;
    if (last >= 0 && names[last] === name && phases[last] === phaseOf(i)) stop[last] = end[i];
    else { begin.push(op.begin[i]); stop.push(end[i]); names.push(name); phases.push(phaseOf(i)); }
  }
  const shade = (i) => (names[i] === "" ? "transparent" : colour(phases[i]));
  return { begin, end: stop, colour: shade, label: (i) => names[i], names };
}

/** The modules that ops came from: two levels from the top, then the layer itself. */
function layerRows(step, op, end, text) {
  const depth = most(op.module.map((_, i) => text("module", i).split(".").length));
  const phase = (i) => step.phases[op.phase[i]];
  const prefix = (parts) => (i) => text("module", i).split(".").slice(0, parts).join(".");
  const rows = [];
  const levels = depth > 2 ? [1, 2, depth] : depth === 2 ? [1, 2] : [1];
  for (const level of levels) {
    const row = spans(op, end, prefix(level), phase);
    row.alpha = (i) => (i % 2 ? 0.62 : 0.8);
    if (row.names.some((name) => name !== "")) rows.push(row);
  }
  return rows;
}

function powerLane(step, op, end, tracks) {
  const energy = step.energy;
  const levels = energy ? finite(op.group.map((g) => (g < 0 ? null : energy.power[g]))) : [];
  // Room for most levels and intervals. Those that say next to nothing would press all others flat: they are cut off.
  const top = quantile(levels, 0.98) * 1.3;
  const ends = energy ? finite(op.group.map((g) => (g < 0 ? null : energy.power_high[g]))) : [];
  const lane = lineLane("power", tracks.length ? tracks[0].origin : energy.origin, "W", tracks, {
    colour: "power", values: levels.concat(ends).filter((value) => value <= top), height: 84,
    under(context, view, y) {
      if (!energy) return;
      const means = new Path2D(), intervals = new Path2D();
      for (let i = Math.max(0, before(op.begin, view.from)); i < op.begin.length && op.begin[i] <= view.to; i++) {
        const g = op.group[i];
        if (g < 0 || energy.power[g] === null) continue;
        const left = view.x(op.begin[i]), width = view.x(end[i]) - left;
        const low = energy.power_low[g], high = energy.power_high[g];
        means.rect(left, y(energy.power[g]), width, y(0) - y(energy.power[g]));
        if (low === null || high === null || width <= 2) continue;
        intervals.rect(left, y(high), width, Math.max(1, y(low) - y(high)));
      }
      context.fillStyle = colour("power");
      context.globalAlpha = 0.22;
      context.fill(means);
      context.fill(intervals);
      context.globalAlpha = 1;
    },
  });
  if (energy) lane.aside = "filled: attributed to ops, with its 95 % interval";
  return lane;
}

function heldLane(op, end) {
  const at = [], mean = [];
  op.begin.forEach((begin, i) => { at.push(begin); mean.push(op.held[i]); });
  at.push(end[end.length - 1]); mean.push(null);
  const held = { name: "tensors", title: "tensors held", unit: "B", holds: true, main: true, at, mean };
  return lineLane("tensors held", "derived", "B", [held], {
    colour: "memory",
    under(context, view, y) {
      const area = new Path2D();
      for (let i = Math.max(0, before(at, view.from)); i < at.length - 1 && at[i] <= view.to; i++) {
        const left = view.x(at[i]);
        if (mean[i] !== null) area.rect(left, y(mean[i]), view.x(at[i + 1]) - left, y(0) - y(mean[i]));
      }
      context.fillStyle = colour("memory");
      context.globalAlpha = 0.18;
      context.fill(area);
      context.globalAlpha = 1;
    },
  });
}

function runModel(run) {
  const steps = {
    begin: run.begin, end: run.end,
    colour: (i) => colour(i % 2 ? "forward" : "backward"),
    label: (i) => (run.each > 1 ? `from ${i * run.each + 1}` : String(i + 1)),
  };
  const lanes = [];
  if (run.begin.length) lanes.push(barLane("steps", [steps], 16));
  for (const tracks of quantities(run.tracks)) lanes.push(trackLane(tracks, { height: 56 }));
  return { span: run.span, unit: 1, lanes, map: lanes[0], tip: (at) => runTip(run, at), spanName: "run" };
}
