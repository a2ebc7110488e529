//! The report of fio's client about several servers: figures of each host and of all, and the throughput over time. Starts
//! nothing.

use crate::error::{BenchError, Result};
use crate::fio::FioFigures;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct HostFigures {
    /// The host as named; empty for all.
    pub host: String,
    /// The figures of all jobs there.
    pub fio: FioFigures,
    /// Processor seconds of fio's own processes.
    pub cpu: f64,
}

/// The figures of a run.
#[derive(Debug, Clone, Default)]
pub struct FleetFigures {
    pub all: HostFigures,
    pub hosts: Vec<HostFigures>,
    /// Seconds since the start, and bytes per second of all hosts.
    pub over_time: Vec<(f64, f64)>,
}

/// Parses what `fio --client … --output-format=json` wrote.
/// `Failed` when the text is no such report, or a host failed; the message has fio's lines.
pub fn parse_fleet(text: &str) -> Result<FleetFigures> {
    let start = text.find("\n{\n").map(|at| at + 1).or_else(|| text.find('{')).unwrap_or(text.len());
    let said: Vec<&str> = text[..start].lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let bad = |why: &str| {
        let tail = said[said.len().saturating_sub(4)..].join(" | ");
        BenchError::Failed(format!("fio: {why}; it printed: {tail}"))
    };
    let mut parser = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
    let json = parser.next().and_then(std::result::Result::ok).ok_or_else(|| bad("no JSON"))?;
    let entries = json["client_stats"].as_array().ok_or_else(|| bad("no client_stats"))?;
    let mut figures = FleetFigures::default();
    for entry in entries {
        let host = entry["hostname"].as_str().unwrap_or_default().to_owned();
        if let Some(error) = entry["error"].as_i64().filter(|error| *error != 0) {
            let error = std::io::Error::from_raw_os_error(error as i32);
            return Err(bad(&format!("{host}: job {}: {error}", entry["jobname"].as_str().unwrap_or("?"))));
        }
        if entry["jobname"] == "All clients" {
            continue;
        }
        let got = entry_figures(host, entry);
        match figures.hosts.iter_mut().find(|known| known.host == got.host) {
            Some(known) => add_figures(known, &got),
            None => figures.hosts.push(got),
        }
    }
    if figures.hosts.is_empty() {
        return Err(bad("no host reported"));
    }
    // fio's sum ("All clients") is missing with a single host, and has no percentiles.
    figures.hosts.iter().for_each(|host| add_figures(&mut figures.all, host));
    if figures.all.fio.bytes == 0 {
        return Err(bad("nothing was read or written"));
    }
    Ok(figures)
}

fn entry_figures(host: String, entry: &Value) -> HostFigures {
    let number = |name: &str| entry[name].as_f64().unwrap_or_default();
    // Percent of the summed time of the host's processes, in milliseconds.
    let cpu = (number("usr_cpu") + number("sys_cpu")) / 100.0 * number("job_runtime") / 1e3;
    HostFigures { host, fio: FioFigures::of_job(entry), cpu }
}

fn add_figures(sum: &mut HostFigures, one: &HostFigures) {
    sum.cpu += one.cpu;
    sum.fio.bandwidth += one.fio.bandwidth;
    sum.fio.iops += one.fio.iops;
    sum.fio.bytes += one.fio.bytes;
    // The slowest host counts.
    if one.fio.latency_us.is_some_and(|(_, p99)| sum.fio.latency_us.is_none_or(|(_, known)| p99 > known)) {
        sum.fio.latency_us = one.fio.latency_us;
    }
}

/// Reads the bandwidth logs that servers sent into `dir`, a log for each process, and sums these: half seconds since the start.
pub fn read_over_time(dir: &Path) -> Vec<(f64, f64)> {
    let mut sums: BTreeMap<u64, f64> = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with("over_bw") {
            continue;
        }
        // Each line: milliseconds, KiB per second, direction, block size, offset.
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        // A delayed line of a process can fall into the half second of the next line: the mean of both counts.
        let mut rates: BTreeMap<(u64, u64), (f64, f64)> = BTreeMap::new();
        for line in text.lines() {
            let mut fields = line.split(',').map(|field| field.trim().parse::<u64>());
            if let (Some(Ok(at)), Some(Ok(rate)), Some(Ok(way))) = (fields.next(), fields.next(), fields.next()) {
                let (sum, count) = rates.entry((at.saturating_add(250) / 500, way)).or_default();
                *sum += rate as f64 * 1024.0;
                *count += 1.0;
            }
        }
        rates.into_iter().for_each(|((half, _), (sum, count))| *sums.entry(half).or_default() += sum / count);
    }
    sums.into_iter().map(|(half, rate)| (half as f64 / 2.0, rate)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(name: &str, host: &str, bytes: u64) -> Value {
        json!({
            "jobname": name, "hostname": host, "port": 8765, "error": 0, "usr_cpu": 2.5, "sys_cpu": 7.5, "job_runtime": 4000,
            "read": { "bw_bytes": bytes / 2, "io_bytes": bytes, "iops": 100.0,
                "clat_ns": { "percentile": { "50.000000": 1000, "99.000000": bytes } } },
            "write": { "bw_bytes": 0, "io_bytes": 0, "iops": 0.0, "clat_ns": {} },
        })
    }

    #[test]
    fn hosts_are_summed_as_fio_does() {
        let all = entry("All clients", "a", 9_000_000);
        let json =
            json!({ "fio version": "fio-3.33", "client_stats": [entry("j", "a", 2000), entry("j", "b", 6000), all] });
        let got = parse_fleet(&format!("<a> j: (g=0): rw=read {{}}\n<b> Starting\n{json:#}\nmore")).unwrap();
        assert_eq!(got.hosts.len(), 2);
        assert_eq!((got.all.fio.bytes, got.all.fio.bandwidth, got.all.fio.iops), (8000, 4000.0, 200.0));
        assert!((got.all.cpu - 0.8).abs() < 1e-9, "{got:?}");
        assert_eq!((got.hosts[0].fio.latency_us, got.all.fio.latency_us), (Some((1.0, 2.0)), Some((1.0, 6.0))));
        let one = parse_fleet(&json!({ "client_stats": [entry("j", "a", 2000)] }).to_string()).unwrap();
        assert_eq!(one.all.fio.latency_us, Some((1.0, 2.0)));
    }

    #[test]
    fn failures_have_the_lines_of_fio() {
        let mut broken = entry("j", "b", 5);
        broken["error"] = json!(22);
        let json = json!({ "client_stats": [entry("j", "a", 5), broken] });
        let error = parse_fleet(&format!("<b> j: you need to specify size=\n{json:#}")).unwrap_err().to_string();
        assert!(error.contains("b: job j: Invalid argument") && error.contains("you need to specify size"), "{error}");
        assert!(parse_fleet("fio: connect: refused\n").unwrap_err().to_string().contains("connect: refused"));
        assert!(parse_fleet("{\"client_stats\": []}").is_err() && parse_fleet("").is_err());
    }

    #[test]
    fn logs_of_hosts_and_processes_are_summed() {
        let dir = tempfile::tempdir().unwrap();
        let log = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        log("over_bw.1.log.a", "500, 10, 0, 0, 0\n1008, 20, 0, 0, 0\n");
        log("over_bw.2.log.a", "499, 4, 0, 0, 0\n502, 3, 1, 0, 0\n");
        log("over_bw.1.log.b", "501, 1, 0, 0, 0\njunk\n");
        log("other", "500, 99, 0\n");
        assert_eq!(read_over_time(dir.path()), [(0.5, 18.0 * 1024.0), (1.0, 20.0 * 1024.0)]);
        // Two lines of one process in one half second.
        log("over_bw.1.log.b", "760, 2, 0, 0, 0\n1240, 4, 0, 0, 0\n");
        assert_eq!(read_over_time(dir.path())[1], (1.0, 23.0 * 1024.0));
    }
}
