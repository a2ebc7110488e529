//! Reads the output of `ib_write_bw`, `ib_write_lat` and the other programs of perftest. Starts none.

use serde::Serialize;

/// Gigabits of 2^20 bytes, which perftest calls MB or, since version 4.5, MiB.
const MIB_TO_GBIT: f64 = 1_048_576.0 * 8.0 / 1e9;

/// An end of a connection, as printed by perftest.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PerftestEnd {
    /// The LID; 0 on Ethernet.
    pub lid: Option<u32>,
    /// The GID as text, without leading zeros removed.
    pub gid: Option<String>,
}

impl PerftestEnd {
    /// Whether the GID is there and all zero: the network namespace has no interface on the HCA.
    pub fn has_zero_gid(&self) -> bool {
        self.gid.as_ref().is_some_and(|gid| gid.bytes().all(|b| b == b'0' || b == b':'))
    }
}

/// A line of results.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PerftestRow {
    /// Position of the table in the output, from 0.
    #[serde(skip)]
    pub table: usize,
    /// Message size.
    pub bytes: u64,
    /// Number of messages.
    pub iterations: Option<u64>,
    /// Average bandwidth in Gb/s, the sum of all directions and ports.
    pub gbps: Option<f64>,
    /// Highest bandwidth in Gb/s, the same sum.
    pub peak_gbps: Option<f64>,
    /// Directions that the bandwidth adds up: 2 of a bidirectional test.
    pub directions: u32,
    /// Ports in the sum: 2 of a test on both ports of a card.
    pub ports: u32,
    /// Lowest latency in microseconds.
    pub min_us: Option<f64>,
    /// Average latency.
    pub average_us: Option<f64>,
    /// Median latency, which perftest calls typical; a test of a fixed time has none.
    pub median_us: Option<f64>,
    /// 99th percentile of the latency.
    pub p99_us: Option<f64>,
    /// Standard deviation of the latency.
    pub stdev_us: Option<f64>,
}

impl PerftestRow {
    /// The average bandwidth of a port in one direction in Gb/s, which the port's rate limits.
    pub fn port_gbps(&self) -> Option<f64> {
        self.gbps.map(|gbps| gbps / f64::from((self.directions * self.ports).max(1)))
    }
}

/// What a run printed.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PerftestReport {
    /// The test, `RDMA_Write BW Test`.
    pub test: Option<String>,
    /// The RDMA device.
    pub device: Option<String>,
    /// `InfiniBand` or `Ethernet`.
    pub link_type: Option<String>,
    /// This end.
    pub local: PerftestEnd,
    /// The other end.
    pub remote: PerftestEnd,
    /// The results.
    pub rows: Vec<PerftestRow>,
    /// Columns whose unit is not known, as in the header.
    pub unknown_columns: Vec<String>,
    /// Lines that report a failure.
    pub failures: Vec<String>,
}

impl PerftestReport {
    /// The rows that show the speed of each table's path: the largest message for bandwidth, which smaller messages do not reach,
    /// and the smallest for latency. Of several rows of the same size the last counts.
    pub fn decisive_rows(&self) -> Vec<&PerftestRow> {
        let tables = self.rows.last().map_or(0, |row| row.table + 1);
        let mut decisive = Vec::new();
        for table in 0..tables {
            let of_table = self.rows.iter().filter(|row| row.table == table);
            decisive.extend(of_table.clone().filter(|row| row.gbps.is_some()).max_by_key(|row| row.bytes));
            let latencies = of_table.filter(|row| row.median_us.is_some() || row.average_us.is_some());
            decisive.extend(latencies.rev().min_by_key(|row| row.bytes));
        }
        decisive
    }
}

/// The unit of a column.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ColumnUnit {
    /// Gigabits per second in a unit of perftest.
    Gbps(f64),
    Microseconds,
    /// A plain number.
    Plain,
}

/// A column of a table.
#[derive(Debug, Clone, PartialEq)]
struct PerftestColumn {
    /// As in the header, with the unit.
    header: String,
    name: String,
    /// `None` for a unit that is not known.
    unit: Option<ColumnUnit>,
}

impl PerftestColumn {
    /// `BW_average[Gb/sec]`, `#bytes`.
    fn parse(word: &str) -> Self {
        let (name, unit) = word.split_once('[').unwrap_or((word, ""));
        let unit = match unit.trim_end_matches(']') {
            "Gb/sec" => Some(ColumnUnit::Gbps(1.0)),
            "MB/sec" | "MiB/sec" => Some(ColumnUnit::Gbps(MIB_TO_GBIT)),
            "usec" => Some(ColumnUnit::Microseconds),
            "" => Some(ColumnUnit::Plain),
            _ => None,
        };
        PerftestColumn { header: word.replace('_', " "), name: name.to_owned(), unit }
    }

    /// Whether the report has the column.
    fn is_read(&self) -> bool {
        const PERFTEST_NAMES: [&str; 7] =
            ["BW_peak", "BW_average", "t_min", "t_avg", "t_typical", "99%_percentile", "t_stdev"];
        PERFTEST_NAMES.contains(&self.name.as_str())
    }
}

/// Reads an output; lines that are not known are skipped.
pub fn read_perftest(text: &str) -> PerftestReport {
    let mut report = PerftestReport::default();
    let mut columns: Vec<PerftestColumn> = Vec::new();
    let mut tables = 0;
    let mut is_bidirectional = false;
    let mut has_two_ports = false;
    let mut is_remote = false;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.ends_with(" Test") {
            is_bidirectional = trimmed.contains("Bidirectional");
            report.test = Some(trimmed.to_owned());
        } else if trimmed.starts_with("#bytes") {
            columns = read_header(trimmed);
            tables += 1;
            for column in columns.iter().filter(|column| column.unit.is_none() && column.is_read()) {
                if !report.unknown_columns.contains(&column.header) {
                    report.unknown_columns.push(column.header.clone());
                }
            }
        } else if !columns.is_empty() && trimmed.starts_with(|c: char| c.is_ascii_digit()) {
            if let Some(row) = read_row(&columns, trimmed) {
                let directions = if is_bidirectional { 2 } else { 1 };
                let ports = if has_two_ports { 2 } else { 1 };
                report.rows.push(PerftestRow { table: tables - 1, directions, ports, ..row });
            }
        } else if trimmed.starts_with("local address") || trimmed.starts_with("remote address") {
            is_remote = trimmed.starts_with("remote");
            let end = if is_remote { &mut report.remote } else { &mut report.local };
            end.lid = word_after(trimmed, "LID").and_then(|w| u32::from_str_radix(w.trim_start_matches("0x"), 16).ok());
        } else if let Some(gid) = trimmed.strip_prefix("GID:") {
            let end = if is_remote { &mut report.remote } else { &mut report.local };
            end.gid = Some(gid.trim().to_owned());
        } else if is_failure(trimmed) {
            report.failures.push(trimmed.to_owned());
        }
        if let Some(word) = value_of(line, "Dual-port") {
            has_two_ports = word == "ON";
        }
        if let Some(device) = value_of(line, "Device") {
            report.device = Some(device);
        }
        if let Some(link) = value_of(line, "Link type") {
            report.link_type = Some(link);
        }
    }
    report
}

/// The value of `NAME   : VALUE`, two of which share a line, separated by tabs.
fn value_of(line: &str, name: &str) -> Option<String> {
    let fields = line.split('\t').map(str::trim).filter(|f| !f.is_empty());
    let mut pairs = fields.filter_map(|f| f.split_once(':'));
    pairs.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
}

fn word_after<'a>(line: &'a str, word: &str) -> Option<&'a str> {
    let mut words = line.split_whitespace();
    words.find(|w| *w == word)?;
    words.next()
}

fn read_header(header: &str) -> Vec<PerftestColumn> {
    let joined = header
        .replace("BW peak", "BW_peak")
        .replace("BW average", "BW_average")
        .replace("% percentile", "%_percentile");
    joined.split_whitespace().map(PerftestColumn::parse).collect()
}

fn read_row(columns: &[PerftestColumn], line: &str) -> Option<PerftestRow> {
    let mut row = PerftestRow::default();
    for (column, word) in columns.iter().zip(line.split_whitespace()) {
        let number: f64 = word.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0)?;
        let is_whole = number.fract() == 0.0;
        match (column.name.as_str(), column.unit) {
            ("#bytes", Some(ColumnUnit::Plain)) if is_whole => row.bytes = number as u64,
            ("#bytes", _) => return None,
            ("#iterations", Some(ColumnUnit::Plain)) if is_whole => row.iterations = Some(number as u64),
            ("BW_peak", Some(ColumnUnit::Gbps(factor))) => row.peak_gbps = Some(number * factor),
            ("BW_average", Some(ColumnUnit::Gbps(factor))) => row.gbps = Some(number * factor),
            ("t_min", Some(ColumnUnit::Microseconds)) => row.min_us = Some(number),
            ("t_avg", Some(ColumnUnit::Microseconds)) => row.average_us = Some(number),
            ("t_typical", Some(ColumnUnit::Microseconds)) => row.median_us = Some(number),
            ("99%_percentile", Some(ColumnUnit::Microseconds)) => row.p99_us = Some(number),
            ("t_stdev", Some(ColumnUnit::Microseconds)) => row.stdev_us = Some(number),
            _ => {}
        }
    }
    Some(row)
}

fn is_failure(line: &str) -> bool {
    let known =
        ["Failed", "Unable", "Couldn't", "Unexpected", "Problems", "Completion with error", "ethernet_read_keys"];
    known.iter().any(|word| line.starts_with(word)) || line.contains("No such device") || line.contains("not found")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BANDWIDTH: &str = "\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : mlx5_0
 Number of qps   : 1\t\tTransport type : IB
 Connection type : RC\t\tUsing SRQ      : OFF
 Mtu             : 4096[B]
 Link type       : IB
---------------------------------------------------------------------------------------
 local address: LID 0x1b QPN 0x0028 PSN 0x7d9b9c RKey 0x1fff00 VAddr 0x007f4d0c0a0000
 remote address: LID 0x2c QPN 0x0028 PSN 0xd0a1e8 RKey 0x1fff00 VAddr 0x007f1b3b0a0000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      5000             46970.12            46953.77\t\t   0.751260
---------------------------------------------------------------------------------------
";

    const LATENCY: &str = "\
                    RDMA_Write Latency Test
 Link type       : Ethernet
 local address: LID 0000 QPN 0x0011 PSN 0x416f84 RKey 0x1804c1 VAddr 0x007f
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:20:00:01
 remote address: LID 0000 QPN 0x0012 PSN 0xbaf42b RKey 0x181ddc VAddr 0x007f
 GID: 00:00:00:00:00:00:00:00:00:00:00:00:00:00:00:00
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 2       1000          1.75           9.12         1.79     \t       1.81        \t0.11   \t\t2.02    \t\t9.12
";

    #[test]
    fn a_bandwidth_run() {
        let report = read_perftest(BANDWIDTH);
        assert_eq!(report.test.as_deref(), Some("RDMA_Write BW Test"));
        assert_eq!((report.device.as_deref(), report.link_type.as_deref()), (Some("mlx5_0"), Some("IB")));
        assert_eq!((report.local.lid, report.remote.lid), (Some(0x1b), Some(0x2c)));
        let row = &report.rows[0];
        assert_eq!((row.bytes, row.iterations), (65536, Some(5000)));
        assert!((row.gbps.unwrap() - 393.88).abs() < 0.1, "{row:?}");
        let gbits = BANDWIDTH.replace("MB/sec", "Gb/sec").replace("46953.77", "393.40");
        assert_eq!(read_perftest(&gbits).rows[0].gbps, Some(393.40));
    }

    #[test]
    fn a_latency_run_and_a_gid_of_zeros() {
        let report = read_perftest(LATENCY);
        let row = &report.rows[0];
        assert_eq!(
            (row.min_us, row.median_us, row.p99_us, row.stdev_us),
            (Some(1.75), Some(1.79), Some(2.02), Some(0.11))
        );
        assert!(report.remote.has_zero_gid() && !report.local.has_zero_gid());
    }

    #[test]
    fn units_are_those_of_the_header_and_unknown_ones_are_named() {
        let average = |unit: &str| read_perftest(&BANDWIDTH.replace("MB/sec", unit));
        let expected = average("MB/sec").rows[0].gbps;
        assert_eq!(average("MiB/sec").rows[0].gbps, expected);
        let unknown = average("GB/sec");
        assert_eq!(unknown.unknown_columns, ["BW peak[GB/sec]", "BW average[GB/sec]"]);
        assert!(unknown.rows[0].gbps.is_none() && unknown.decisive_rows().is_empty());
        let cycles = read_perftest(&LATENCY.replace("usec", "cycles"));
        assert_eq!((cycles.unknown_columns.len(), cycles.rows[0].median_us), (5, None));
    }

    #[test]
    fn the_largest_message_of_each_table_says_how_fast_a_port_is() {
        let header = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n";
        let rows = " 2 10000 0.098 0.095 5.9\n 65536 10000 197.0 196.4 0.3\n 8388608 10000 197.3 197.2 0.0\n";
        let first = format!("   RDMA_Write BW Test\n{header}{rows}");
        let second = format!("   Send Bidirectional BW Test\n Dual-port       : ON\t\tDevice : mlx5_0\n{header}{rows}");
        let report = read_perftest(&format!("{first}{second}"));
        let decisive = report.decisive_rows();
        let sizes: Vec<u64> = decisive.iter().map(|row| row.bytes).collect();
        assert_eq!((report.rows.len(), sizes.as_slice()), (6, &[8_388_608, 8_388_608][..]));
        assert_eq!((decisive[0].directions, decisive[0].ports, decisive[0].port_gbps()), (1, 1, Some(197.2)));
        assert_eq!((decisive[1].directions, decisive[1].ports, decisive[1].port_gbps()), (2, 2, Some(49.3)));
        let latencies = LATENCY.to_owned() + " 8388608 1000 90.0 99.0 91.0 92.0 0.1 95.0 99.0\n";
        assert_eq!(read_perftest(&latencies).decisive_rows()[0].bytes, 2);
        let timed = " #bytes        #iterations       t_avg[usec]    tps average\n 2 500 1.81 552486.1\n";
        let timed = read_perftest(timed);
        assert_eq!(timed.decisive_rows()[0].average_us, Some(1.81));
    }

    #[test]
    fn failures_are_kept() {
        let report = read_perftest("Failed to modify QP 218 to RTR\n Unable to Connect the HCA's through the link\n");
        assert_eq!(report.failures.len(), 2);
        assert!(report.rows.is_empty());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(#bytes [a-z%\\[\\]_ ]{0,40}\n)?[0-9. \t-]{0,40}\\PC{0,100}") {
            let _ = read_perftest(&text);
        }
    }
}
