// What the tip says of a time: the op there, and the lines of samples.

function opTip(step, op, end, at) {
  let i = before(op.begin, at);
  if (i >= 0 && at > end[i] + 1e-9) i = -1;
  const lines = [["at", quantity(at * 1e-6, "s")]];
  if (i < 0) return { op: -1, title: "between ops", where: "", lines };
  lines.push(...opLines(step, op, i));
  return { op: i, title: step.texts[op.name[i]], where: step.texts[op.kind[i]], lines };
}

function opLines(step, op, i) {
  const text = (column) => step.texts[op[column][i]], lines = [];
  const why = ["first time", "recomputed", "waits for storage"][op.why[i]];
  if (text("module")) lines.push(["layer", text("module")]);
  lines.push(["phase", `${step.phases[op.phase[i]]}, ${why}`]);
  if (most(op.part) > 0) lines.push(["micro-batch", String(op.part[i] + 1)]);
  const seconds = op.middle[i] * 1e-6;
  lines.push(["time here", quantity(op.time[i] * 1e-6, "s")]);
  const spread = range(op.low[i] * 1e-6, op.high[i] * 1e-6, seconds, "s");
  const each = (amount, unit) => (seconds ? ` (${quantity(amount / seconds, unit)}/s)` : "");
  lines.push([`median of ${step.steps}`, `${quantity(seconds, "s")} (${spread})`]);
  if (op.flops[i]) lines.push(["work", quantity(op.flops[i], "FLOP") + each(op.flops[i], "FLOP")]);
  const bytes = op.read[i] + op.written[i];
  const moved = `${quantity(op.read[i], "B")}, ${quantity(op.written[i], "B")}`;
  if (bytes) lines.push(["reads, writes", moved + each(bytes, "B")]);
  if (op.held[i] !== null) lines.push(["tensors held", quantity(op.held[i], "B")]);
  return lines.concat(energyLines(step.energy, op.group[i]));
}

function energyLines(energy, group) {
  if (!energy) return [["energy", "unavailable"]];
  if (group < 0 || energy.amount[group] === null) return [["energy", "no figure: no sample met it"]];
  const amount = energy.amount[group], others = energy.count[group] - 1;
  const ends = range(energy.low[group], energy.high[group], amount, "J");
  const lines = [[`energy, ${energy.origin}`, quantity(amount, "J") + (ends ? ` (${ends})` : "")]];
  if (others > 0) lines.push(["merged", `with ${others} other op${others > 1 ? "s" : ""}: one figure for all`]);
  return lines;
}

function runTip(run, at) {
  const i = before(run.begin, at);
  const inside = i >= 0 && at <= run.end[i];
  const title = !inside ? "outside of steps" : run.each > 1 ? `steps from ${i * run.each + 1}` : `step ${i + 1}`;
  return { op: inside ? i : -1, title, where: "", lines: [["at", quantity(at, "s")]] };
}

/** What the first lines of each lane say at a time. */
function trackLines(lanes, at, each) {
  const lines = [];
  for (const lane of lanes) {
    if (!lane.series) continue;
    const main = lane.series.filter((each) => each.main), several = main.length > 1 && each > 1;
    for (const one of main.slice(0, each)) {
      const value = valueAt(one, at);
      if (one.title === "tensors held") continue; // the op has told it
      const name = several ? `${lane.title}: ${one.name}` : lane.title;
      lines.push([name, value === null ? "no sample" : quantity(value, lane.unit)]);
    }
  }
  return lines;
}
