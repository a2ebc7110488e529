//! Counters as a dstat-like table: the columns of each section, and numbers in five characters. Knows no socket and no clock.

use anstyle::{AnsiColor, Style};
use spurline_config::Fault;
use spurline_observe::documents::{ProcessRole, ProcessStatus};
use spurline_types::Stats;
use spurline_types::stats::Metric;
use std::fmt::Write as _;

use ColumnKind::{Bytes, Count, Failures, Flow, Latency, PairShare, Percent, Rate, Share};

const COLUMN_WIDTH: usize = 6;

/// A counter or gauge of a process.
type MetricOf = fn(&Stats) -> &Metric;

/// How a column follows from the counters.
#[derive(Debug, Clone, Copy)]
enum ColumnKind {
    /// Microseconds of processor time, as percent of a processor.
    Percent(MetricOf),
    /// A gauge of bytes.
    Bytes(MetricOf),
    /// A gauge.
    Count(MetricOf),
    /// Operations per second.
    Rate(MetricOf),
    /// Failures per second, which are red.
    Failures(MetricOf),
    /// Bytes per second.
    Flow(MetricOf),
    /// Mean milliseconds: microseconds by operations.
    Latency(MetricOf, MetricOf),
    /// Percent of the first in both together.
    Share(MetricOf, MetricOf),
    /// Percent of the bytes of the first two counters in the bytes of all four.
    PairShare([MetricOf; 2], [MetricOf; 2]),
}

struct StatsSection {
    letter: char,
    title: &'static str,
    columns: &'static [StatsColumn],
}

struct StatsColumn {
    head: &'static str,
    kind: ColumnKind,
    meaning: &'static str,
}

impl StatsSection {
    /// Whether any number of this section is not zero since the start of the process.
    fn has_figures(&self, now: &Stats) -> bool {
        self.columns.iter().any(|column| column.kind.has_figure(now))
    }
}

const fn column(head: &'static str, kind: ColumnKind, meaning: &'static str) -> StatsColumn {
    StatsColumn { head, kind, meaning }
}

const STATS_SECTIONS: [StatsSection; 10] = [
    StatsSection {
        letter: 'u',
        title: "usage",
        columns: &[
            column("cpu", Percent(|s| &s.usage.cpu_us), "processor time"),
            column("mem", Bytes(|s| &s.usage.rss_bytes), "resident memory"),
            column("buf", Bytes(|s| &s.usage.buffer_bytes), "memory in use of --buffer-size"),
        ],
    },
    StatsSection {
        letter: 'f',
        title: "fuse",
        columns: &[
            column("ops", Rate(|s| &s.fuse.ops), "requests of the kernel"),
            column("lat", Latency(|s| &s.fuse.busy_us, |s| &s.fuse.ops), "time of a request"),
            column("read", Flow(|s| &s.fuse.read_bytes), "bytes read by programs, without passthrough"),
            column("err", Failures(|s| &s.fuse.errors), "requests that failed"),
        ],
    },
    StatsSection {
        letter: 's',
        title: "s3",
        columns: &[
            column("ops", Rate(|s| &s.s3.ops), "requests of S3 clients"),
            column("lat", Latency(|s| &s.s3.busy_us, |s| &s.s3.ops), "time until an answer begins"),
            column("read", Flow(|s| &s.s3.read_bytes), "bytes for S3 clients"),
            column("write", Flow(|s| &s.s3.write_bytes), "bytes from S3 clients"),
            column("conns", Count(|s| &s.s3.connections), "connections of S3 clients"),
            column("err", Failures(|s| &s.s3.errors), "requests that failed"),
        ],
    },
    StatsSection {
        letter: 'w',
        title: "writes",
        columns: &[
            column("write", Flow(|s| &s.fuse.write_bytes), "bytes written by programs, without passthrough"),
            column("lat", Latency(|s| &s.fuse.write_us, |s| &s.fuse.write_ops), "time of a write"),
            column("chg", Rate(|s| &s.fuse.change_ops), "changes of names and attributes"),
            column("dirty", Bytes(|s| &s.writes.dirty_bytes), "written data that no node has yet"),
            column(
                "behnd",
                Latency(|s| &s.writes.behind_us, |s| &s.writes.sent_ops),
                "time from a write until a node has its bytes",
            ),
            column("sync", Latency(|s| &s.writes.sync_us, |s| &s.writes.sync_ops), "time of a sync by a node"),
            column("rsent", Flow(|s| &s.writes.resent_bytes), "bytes sent again after the loss of a node"),
            column("fail", Failures(|s| &s.writes.failures), "writes that the source refused after they had returned"),
            column("srvd", Flow(|s| &s.writes.served_bytes), "bytes that a node has written for mounts"),
            column("rdma", Flow(|s| &s.rdma.read_bytes), "bytes that a node has read from the memory of mounts"),
            column("rlat", Latency(|s| &s.rdma.r_us, |s| &s.rdma.r_ops), "time of such a read"),
        ],
    },
    StatsSection {
        letter: 'x',
        title: "nfs export",
        columns: &[
            column("cli", Count(|s| &s.export.clients), "NFS clients"),
            column("read", Flow(|s| &s.export.read_bytes), "bytes read by NFS clients"),
            column("write", Flow(|s| &s.export.write_bytes), "bytes written by NFS clients"),
            column("stale", Rate(|s| &s.export.stale_handles), "requests whose file handle led to no file"),
            column("thrd", Count(|s| &s.export.threads), "threads of the NFS server"),
        ],
    },
    StatsSection {
        letter: 'm',
        title: "metadata",
        columns: &[
            column("ops", Rate(|s| &s.metadata.ops), "lookups and listings sent to the origin or a node"),
            column("lat", Latency(|s| &s.metadata.lat_us, |s| &s.metadata.ops), "time of such a request"),
            column("hits", Rate(|s| &s.metadata.cache_hits), "lookups answered from memory"),
            column(
                "stale",
                Rate(|s| &s.metadata.stale_answers),
                "answers past their lifetime, while the origin is silent",
            ),
        ],
    },
    StatsSection {
        letter: 'c',
        title: "blockcache",
        columns: &[
            column(
                "hit%",
                Share(|s| &s.blockcache.hit_bytes, |s| &s.blockcache.miss_bytes),
                "bytes from memory and disk, of all bytes",
            ),
            column("mem", Flow(|s| &s.blockcache.mem_hit_bytes), "bytes from memory"),
            column("disk", Flow(|s| &s.blockcache.disk_hit_bytes), "bytes from cache disks"),
            column(
                "lat",
                Latency(|s| &s.blockcache.read_us, |s| &s.blockcache.read_ops),
                "time of a read of a cache disk",
            ),
            column("fill", Flow(|s| &s.blockcache.write_bytes), "bytes stored on cache disks"),
            column("used", Bytes(|s| &s.blockcache.used_bytes), "blocks on cache disks"),
        ],
    },
    StatsSection {
        letter: 'r',
        title: "remotecache",
        columns: &[
            column("recv", Flow(|s| &s.remotecache.recv_bytes), "bytes received from nodes, or by a node"),
            column("send", Flow(|s| &s.remotecache.send_bytes), "bytes sent"),
            column("ops", Rate(|s| &s.remotecache.ops), "requests sent to nodes"),
            column("lat", Latency(|s| &s.remotecache.lat_us, |s| &s.remotecache.ops), "time of such a request"),
            column(
                "rdma%",
                PairShare(
                    [|s| &s.rdma.recv_bytes, |s| &s.rdma.write_bytes],
                    [|s| &s.tcp.recv_bytes, |s| &s.tcp.send_bytes],
                ),
                "bytes over RDMA, of all bytes",
            ),
            column("up", Count(|s| &s.remotecache.peers_up), "nodes that are connected"),
            column("retry", Rate(|s| &s.remotecache.retries), "requests sent again"),
        ],
    },
    StatsSection {
        letter: 'e',
        title: "rdma",
        columns: &[
            column("write", Flow(|s| &s.rdma.write_bytes), "bytes written into the memory of peers"),
            column("recv", Flow(|s| &s.rdma.recv_bytes), "bytes that peers wrote into the memory here"),
            column("w_ops", Rate(|s| &s.rdma.w_ops), "RDMA writes"),
            column("lat", Latency(|s| &s.rdma.w_us, |s| &s.rdma.w_ops), "time of an RDMA write"),
            column("up", Count(|s| &s.rdma.paths_up), "paths that carry data"),
            column("down", Count(|s| &s.rdma.paths_down), "paths that carry none"),
        ],
    },
    StatsSection {
        letter: 'o',
        title: "object",
        columns: &[
            column("get", Flow(|s| &s.object.get_bytes), "bytes read from the origin"),
            column("ops", Rate(|s| &s.object.get_ops), "reads of the origin"),
            column("lat", Latency(|s| &s.object.get_us, |s| &s.object.get_ops), "time of such a read"),
            column("put", Flow(|s| &s.object.put_bytes), "bytes written to the origin"),
            column("upl", Count(|s| &s.object.uploads), "uploads in parts under way"),
            column("err", Failures(|s| &s.object.errors), "requests to the origin that failed finally"),
        ],
    },
];

/// The chosen sections, in the order chosen.
pub struct StatsTable {
    sections: Vec<&'static StatsSection>,
}

const TITLE: Style = AnsiColor::Blue.on_default().bold();
const HEAD: Style = Style::new().bold().underline();
const DIM: Style = Style::new().dimmed();

impl StatsTable {
    /// Takes the letters of `--schema`.
    ///
    /// # Errors
    /// When a letter names no section, or there is none.
    pub fn new(schema: &str) -> Result<Self, Fault> {
        let known: Vec<String> = STATS_SECTIONS.iter().map(|s| format!("{} {}", s.letter, s.title)).collect();
        let sections: Vec<_> = schema
            .chars()
            .map(|letter| {
                STATS_SECTIONS.iter().find(|s| s.letter == letter).ok_or_else(|| {
                    Fault::usage(
                        format!("--schema '{schema}': no section '{letter}'"),
                        format!("there are {}", known.join(", ")),
                    )
                })
            })
            .collect::<Result<_, _>>()?;
        if sections.is_empty() {
            return Err(Fault::usage("--schema is empty", format!("there are {}", known.join(", "))));
        }
        Ok(StatsTable { sections })
    }

    /// The sections in `own`, and sections that have figures by now.
    pub fn with_figures(own: &str, now: &Stats) -> Self {
        let sections = STATS_SECTIONS.iter();
        StatsTable {
            sections: sections.filter(|section| own.contains(section.letter) || section.has_figures(now)).collect(),
        }
    }

    /// Leaves out the last sections, so that a line fits into `width`; returns the letters and titles of these.
    pub fn fit_into(&mut self, width: usize) -> String {
        let mut used = 0;
        let fitting = self.sections.iter().take_while(|section| {
            used += section.columns.len() * COLUMN_WIDTH + usize::from(used > 0);
            used <= width
        });
        let keep = fitting.count().max(1);
        let left_out: Vec<String> =
            self.sections.drain(keep..).map(|section| format!("{} {}", section.letter, section.title)).collect();
        left_out.join(", ")
    }

    /// The letters of the sections.
    pub fn letters(&self) -> String {
        self.sections.iter().map(|section| section.letter).collect()
    }

    /// The two lines above the numbers.
    pub fn header_lines(&self, colour: bool) -> [String; 2] {
        let mut titles = Vec::new();
        let mut heads = Vec::new();
        for section in &self.sections {
            let width = section.columns.len() * COLUMN_WIDTH - 1;
            let dashes = width.saturating_sub(section.title.len());
            let title = format!(" {}{}{}", "-".repeat(dashes / 2), section.title, "-".repeat(dashes - dashes / 2));
            titles.push(painted(TITLE, &title, colour));
            let cells: Vec<String> = section
                .columns
                .iter()
                .map(|column| {
                    format!(" {}", painted(HEAD, &format!("{:>w$}", column.head, w = COLUMN_WIDTH - 1), colour))
                })
                .collect();
            heads.push(cells.concat());
        }
        [titles.join(" "), heads.join(&painted(DIM, "|", colour))]
    }

    /// The numbers of the `seconds` between two answers.
    pub fn table_line(&self, before: &Stats, now: &Stats, seconds: f64, colour: bool) -> String {
        let sections: Vec<String> = self
            .sections
            .iter()
            .map(|section| {
                let cells = section.columns.iter().map(|column| {
                    let (text, style) = column.kind.cell_text(before, now, seconds);
                    painted(style, &format!("{text:>COLUMN_WIDTH$}"), colour)
                });
                cells.collect::<String>()
            })
            .collect();
        sections.join(&painted(DIM, "|", colour))
    }
}

fn painted(style: Style, text: &str, colour: bool) -> String {
    if colour { format!("{style}{text}{style:#}") } else { text.to_owned() }
}

/// The sections that a process of this kind always has: `u`, and by its role.
pub fn own_sections(status: &ProcessStatus) -> &'static str {
    let export = status.mount().and_then(|mount| mount.export.as_ref()).is_some_and(|export| export.active);
    match &status.role {
        ProcessRole::Mount(mount) if mount.writes.writable && export => "ufwx",
        ProcessRole::Mount(mount) if mount.writes.writable => "ufw",
        ProcessRole::Mount(_) if export => "ufx",
        ProcessRole::Mount(_) => "uf",
        ProcessRole::Node(_) => "ur",
        ProcessRole::Gateway(_) => "us",
        ProcessRole::Coordinator(_) | ProcessRole::Other => "u",
    }
}

/// The sections and columns with units, for `--help`.
pub fn columns_help() -> String {
    let mut text = "Sections of --schema and their columns. Bytes are in units of 1024 (K, M, G, T), numbers in units of 1000; - is \
                    no value. Without --schema: the sections that have figures, as far as the terminal is wide.\n"
        .to_owned();
    for section in &STATS_SECTIONS {
        let _ = write!(text, "\n  {} {}\n", section.letter, section.title);
        for column in section.columns {
            let _ = writeln!(text, "    {:<6} {}{}", column.head, column.meaning, column.kind.unit());
        }
    }
    text
}

impl ColumnKind {
    /// The unit, behind the meaning of a column.
    fn unit(self) -> &'static str {
        match self {
            ColumnKind::Percent(_) => ", % of one processor",
            ColumnKind::Bytes(_) => ", bytes",
            ColumnKind::Count(_) => "",
            ColumnKind::Rate(_) | ColumnKind::Failures(_) | ColumnKind::Flow(_) => ", per second",
            ColumnKind::Latency(..) => ", mean in ms",
            ColumnKind::Share(..) | ColumnKind::PairShare(..) => ", %",
        }
    }

    /// Whether a counter or gauge behind this number is not zero.
    fn has_figure(self, now: &Stats) -> bool {
        match self {
            ColumnKind::Percent(of)
            | ColumnKind::Bytes(of)
            | ColumnKind::Count(of)
            | ColumnKind::Rate(of)
            | ColumnKind::Failures(of)
            | ColumnKind::Flow(of)
            | ColumnKind::Latency(_, of) => of(now).get() > 0,
            ColumnKind::Share(part, other) => part(now).get() + other(now).get() > 0,
            ColumnKind::PairShare(part, other) => part.into_iter().chain(other).any(|of| of(now).get() > 0),
        }
    }

    fn cell_text(self, before: &Stats, now: &Stats, seconds: f64) -> (String, Style) {
        // A restarted process counts from 0 again; the first line shows zeros.
        match self {
            ColumnKind::Percent(of) => {
                let percent = metric_growth(now, before, of) / seconds.max(1e-9) / 10_000.0;
                let style = if percent >= 90.0 { AnsiColor::Red.on_default() } else { heat_style(percent > 0.0) };
                (fixed_digits(percent) + "%", style)
            }
            ColumnKind::Bytes(of) => scaled_number(of(now).get() as f64, 1024.0),
            ColumnKind::Count(of) => scaled_number(of(now).get() as f64, 1000.0),
            ColumnKind::Rate(of) => scaled_number(metric_growth(now, before, of) / seconds.max(1e-9), 1000.0),
            ColumnKind::Failures(of) => {
                let (text, style) = scaled_number(metric_growth(now, before, of) / seconds.max(1e-9), 1000.0);
                (text, if metric_growth(now, before, of) > 0.0 { AnsiColor::Red.on_default().bold() } else { style })
            }
            ColumnKind::Flow(of) => scaled_number(metric_growth(now, before, of) / seconds.max(1e-9), 1024.0),
            ColumnKind::Latency(time, operations) => {
                let operations = metric_growth(now, before, operations);
                if operations == 0.0 {
                    return ("-".into(), DIM);
                }
                let ms = metric_growth(now, before, time) / operations / 1000.0;
                let style = if ms >= 100.0 { AnsiColor::Red.on_default() } else { heat_style(true) };
                (fixed_digits(ms), style)
            }
            ColumnKind::Share(part, other) => {
                percent_of(metric_growth(now, before, part), metric_growth(now, before, other))
            }
            ColumnKind::PairShare([a, b], [c, d]) => percent_of(
                metric_growth(now, before, a) + metric_growth(now, before, b),
                metric_growth(now, before, c) + metric_growth(now, before, d),
            ),
        }
    }
}

fn metric_growth(now: &Stats, before: &Stats, of: MetricOf) -> f64 {
    of(now).get().saturating_sub(of(before).get()) as f64
}

/// `part` as percent of both.
fn percent_of(part: f64, other: f64) -> (String, Style) {
    if part + other == 0.0 {
        return ("-".into(), DIM);
    }
    let percent = part / (part + other) * 100.0;
    let style = if percent >= 90.0 { AnsiColor::Green } else { AnsiColor::Yellow }.on_default();
    (fixed_digits(percent), style)
}

fn heat_style(lively: bool) -> Style {
    if lively { Style::new() } else { DIM }
}

/// A number in at most four characters and a dot.
fn fixed_digits(n: f64) -> String {
    match n {
        n if n >= 99.95 => format!("{n:.0}"),
        n if n >= 9.995 => format!("{n:.1}"),
        n if n > 0.0 => format!("{n:.2}"),
        _ => "0".into(),
    }
}

/// A number with the unit, coloured by size as in dstat.
fn scaled_number(n: f64, base: f64) -> (String, Style) {
    let units = [
        ("", None),
        ("K", Some(AnsiColor::Cyan)),
        ("M", Some(AnsiColor::Green)),
        ("G", Some(AnsiColor::Yellow)),
        ("T", Some(AnsiColor::Magenta)),
    ];
    let mut value = n;
    let mut unit = 0;
    while value >= 999.5 && unit < units.len() - 1 {
        value /= base;
        unit += 1;
    }
    let text = match unit {
        0 if value.fract() == 0.0 || value >= 10.0 => format!("{value:.0}"),
        _ => fixed_digits(value),
    };
    let style = units[unit].1.map_or(heat_style(n > 0.0), |c| c.on_default());
    (text + units[unit].0, style)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read_stats(document: &Value) -> Stats {
        Stats::from_json(document).unwrap()
    }

    /// Two answers of a mount, two seconds apart.
    fn recorded() -> [Stats; 2] {
        let at = |n: u64| {
            read_stats(&json!({
                "usage": {"cpu_us": 1_000_000 * n, "rss_bytes": 300u64 << 20, "buffer_bytes": 0},
                "fuse": {"ops": 5000 * n, "busy_us": 600_000 * n, "read_bytes": (3u64 << 30) * n, "errors": 0},
                "metadata": {"ops": 0, "lat_us": 0, "cache_hits": 7 * n, "stale_answers": 0},
                "blockcache": {"hit_bytes": 95 * n, "miss_bytes": 5 * n, "mem_hit_bytes": 0, "disk_hit_bytes": (3u64 << 30) * n,
                    "read_us": 400_000 * n, "read_ops": 2 * n, "write_bytes": 0, "used_bytes": 5u64 << 40},
                "object": {"get_bytes": 0, "get_ops": 4 * n, "get_us": 0, "put_bytes": 0, "errors": 3 * n}
            }))
        };
        [at(1), at(3)]
    }

    #[test]
    fn a_recorded_pair_of_answers() {
        let [before, now] = recorded();
        let table = StatsTable::new("ufmco").unwrap();
        let [titles, heads] = table.header_lines(false);
        assert_eq!(
            [titles.as_str(), heads.as_str(), &table.table_line(&before, &now, 2.0, false)],
            [
                " ------usage------  ---------fuse----------  -------metadata--------  ------------blockcache-------------  --------------object---------------",
                "   cpu   mem   buf|   ops   lat  read   err|   ops   lat  hits stale|  hit%   mem  disk   lat  fill  used|   get   ops   lat   put   upl   err",
                "  100%  300M     0| 5.00K  0.12 3.00G     0|     0     -     7     0|  95.0     0 3.00G   200     0 5.00T|     0     4     0     0     0     3",
            ]
        );
    }

    #[test]
    fn the_share_of_rdma_in_the_remote_bytes() {
        let at = |rdma: u64, tcp: u64| {
            let stats = Stats::default();
            stats.rdma.recv_bytes.set(rdma);
            stats.rdma.write_bytes.set(rdma);
            stats.tcp.recv_bytes.set(tcp);
            stats.tcp.send_bytes.set(tcp);
            stats
        };
        let table = StatsTable::new("r").unwrap();
        let [_, heads] = table.header_lines(false);
        let share = |now: &Stats| {
            let line = table.table_line(&at(10, 10), now, 1.0, false);
            let cells: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            let column = heads.split_whitespace().position(|head| head == "rdma%").unwrap();
            cells[column].clone()
        };
        assert_eq!(share(&at(40, 20)), "75.0");
        assert_eq!(share(&at(20, 10)), "100");
        assert_eq!(share(&at(10, 10)), "-", "nothing came");
    }

    #[test]
    fn a_writing_mount_and_its_node() {
        let at = |n: u64| {
            read_stats(&json!({
                "fuse": {"write_bytes": (1u64 << 30) * n, "write_us": 500 * n, "write_ops": 4 * n, "change_ops": 30 * n},
                "writes": {"dirty_bytes": 8 << 20, "behind_us": 6000 * n, "sent_ops": n, "sync_us": 0, "sync_ops": 0,
                    "resent_bytes": 0, "failures": n, "served_bytes": 0},
                "rdma": {"read_bytes": (1u64 << 20) * n, "r_us": 900 * n, "r_ops": 3 * n}
            }))
        };
        let table = StatsTable::new("w").unwrap();
        let [_, heads] = table.header_lines(false);
        assert_eq!(heads, " write   lat   chg dirty behnd  sync rsent  fail  srvd  rdma  rlat");
        let line = table.table_line(&at(1), &at(2), 1.0, false);
        assert_eq!(line, " 1.00G  0.12    30 8.00M  6.00     -     0     1     0 1.00M  0.30");
        assert!(table.table_line(&at(1), &at(2), 1.0, true).contains("\u{1b}[1m\u{1b}[31m"), "failures are red");
    }

    /// The sections of a process with this status and these counters.
    fn shown(status: Value, stats: Value) -> String {
        let own = own_sections(&ProcessStatus::from_json(&status).unwrap());
        StatsTable::with_figures(own, &read_stats(&stats)).letters()
    }

    #[test]
    fn sections_with_figures_are_shown_and_those_of_the_role() {
        assert_eq!(shown(json!({"kind": "mount"}), json!({})), "uf");
        assert_eq!(shown(json!({"kind": "mount"}), json!({"object": {"get_ops": 1}, "s3": {"ops": 2}})), "ufso");
        assert_eq!(shown(json!({"kind": "other"}), json!({"rdma": {"paths_down": 1}})), "ue");
        assert_eq!(
            shown(json!({"kind": "node", "writes": {"writable": true}}), json!({"writes": {"served_bytes": 1}})),
            "uwr"
        );
        assert_eq!(shown(json!({"kind": "gateway"}), json!({})), "us");
        let exported = json!({"kind": "mount", "writes": {"writable": true}, "export": {"active": true}});
        assert_eq!(shown(exported, json!({})), "ufwx");
    }

    #[test]
    fn a_line_fits_into_the_terminal() {
        for width in [1, 18, 80, 100, 1000] {
            let mut table = StatsTable::new("ufmcro").unwrap();
            let left_out = table.fit_into(width);
            let line = table.table_line(&Stats::default(), &Stats::default(), 1.0, false);
            assert!(line.len() <= width.max(18), "{width}: {line}");
            assert_eq!(left_out.is_empty(), width == 1000, "{left_out}");
        }
    }

    #[test]
    fn the_help_has_every_column_in_a_line_of_a_small_terminal() {
        let help = columns_help();
        for column in STATS_SECTIONS.iter().flat_map(|section| section.columns) {
            assert!(help.contains(&format!("\n    {:<6} {}", column.head, column.meaning)), "{}", column.head);
        }
        assert!(help.lines().skip(1).all(|line| line.chars().count() <= 79), "{help}");
    }

    #[test]
    fn colours_only_when_asked() {
        let [before, now] = recorded();
        let table = StatsTable::new("fo").unwrap();
        assert!(!table.table_line(&before, &now, 1.0, false).contains('\u{1b}'));
        let painted = table.table_line(&before, &now, 1.0, true);
        assert!(painted.contains("\u{1b}[33m"), "gigabytes are yellow: {painted:?}");
        assert!(painted.contains("\u{1b}[1m\u{1b}[31m"), "errors are red: {painted:?}");
        assert_eq!(anstream::adapter::strip_str(&painted).to_string(), table.table_line(&before, &now, 1.0, false));
    }

    #[test]
    fn a_restarted_or_older_process_gives_no_nonsense() {
        let [before, now] = recorded();
        let table = StatsTable::new("ufwxmcreo").unwrap();
        let line = table.table_line(&now, &before, 1.0, false);
        assert!(!line.contains('T') || line.contains("5.00T"), "{line}");
        let empty = table.table_line(&Stats::default(), &Stats::default(), 0.0, false);
        assert!(!empty.contains("NaN") && !empty.contains("inf"), "{empty}");
    }

    #[test]
    fn numbers_fit_their_column() {
        for n in [0.0, 0.004, 1.0, 9.996, 99.96, 999.4, 999.6, 1023.0, 1_048_575.0, 1e9, 123_456_789_012.0, 1e15] {
            for base in [1000.0, 1024.0] {
                let (text, _) = scaled_number(n, base);
                assert!(text.len() < COLUMN_WIDTH, "{n}: {text}");
            }
        }
        assert!(StatsTable::new("uz").is_err() && StatsTable::new("").is_err());
    }
}
