//! A run as a short table for a terminal.
//!
//! Callers: the command.

use crate::outcome::{Latency, Run};
use std::fmt::Write;

/// The table of one run.
pub fn text(run: &Run) -> String {
    let (job, outcome) = (&run.job, &run.outcome);
    let mut out = String::new();
    let _ = writeln!(out, "{}: {}, {:.2} s", job.name, run.target, outcome.elapsed_s);
    let head = ["", "IOPS", "MiB/s", "mean us", "p50", "p90", "p99", "p99.9", "max"];
    let mut rows = vec![head.map(str::to_owned)];
    for op in &outcome.ops {
        let rate = |count: u64| count as f64 / outcome.elapsed_s.max(1e-9);
        rows.push(row(op.op.name(), rate(op.requests), rate(op.bytes), &op.latency));
    }
    if outcome.ops.len() > 1 {
        rows.push(row("all", outcome.iops, outcome.bytes_per_s, &outcome.latency));
    }
    let mut widths = [0; 9];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    for row in &rows {
        let _ = write!(out, "  {:<width$}", row[0], width = widths[0]);
        for (cell, width) in row.iter().zip(widths).skip(1) {
            let _ = write!(out, "  {cell:>width$}");
        }
        out.push('\n');
    }
    notes(run, &mut out);
    out
}

fn row(name: &str, iops: f64, bytes: f64, latency: &Latency) -> [String; 9] {
    let us = |ns: u64| format!("{:.1}", ns as f64 / 1000.0);
    [
        name.to_owned(),
        format!("{iops:.0}"),
        format!("{:.1}", bytes / (1 << 20) as f64),
        format!("{:.1}", latency.mean_ns / 1000.0),
        us(latency.p50_ns),
        us(latency.p90_ns),
        us(latency.p99_ns),
        us(latency.p999_ns),
        us(latency.max_ns),
    ]
}

/// What is not in the table.
fn notes(run: &Run, out: &mut String) {
    let outcome = &run.outcome;
    let _ = write!(out, "  CPU: client {:.2} s", outcome.cpu.client_s);
    if let (Some(s), Some(us)) = (outcome.cpu.server_s, outcome.cpu.server_us_per_request) {
        let _ = write!(out, ", server {s:.2} s ({us:.2} us a request)");
    }
    out.push('\n');
    if let Some(flush) = outcome.final_flush_s {
        let _ = writeln!(out, "  the flush at the end took {:.1} ms", flush * 1000.0);
    }
    if let Some(schedule) = outcome.schedule {
        let _ = writeln!(
            out,
            "  schedule: {:.0} a second; left late by {:.1} us on average, {:.1} us at most",
            schedule.rate,
            schedule.late_mean_ns / 1000.0,
            schedule.late_max_ns as f64 / 1000.0
        );
        if schedule.unsent > 0 {
            let _ = writeln!(
                out,
                "  {} requests were due and never sent: the target does not keep up",
                schedule.unsent
            );
        }
    }
    for device in &outcome.devices {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        let times = |ratio: Option<f64>| ratio.map_or(String::new(), |r| format!(" (x {r:.2})"));
        let _ = writeln!(
            out,
            "  {}: {:.1} MiB read{}, {:.1} MiB written{}, {} flushes",
            device.name,
            mib(device.read_bytes),
            times(device.read_amplification),
            mib(device.written_bytes),
            times(device.write_amplification),
            device.flushes
        );
    }
    if outcome.errors > 0 {
        let first = outcome.first_error.as_deref().unwrap_or_default();
        let _ = writeln!(out, "  {} requests failed, the first: {first}", outcome.errors);
    }
    if let Some(found) = &outcome.verified {
        let _ = writeln!(
            out,
            "  content: {} blocks compared; {} corrupt, {} misplaced, {} lost, {} stale",
            found.units, found.corrupt, found.misplaced, found.lost, found.stale
        );
        for finding in &found.findings {
            let _ = writeln!(out, "    {}", finding.text);
        }
    }
}
