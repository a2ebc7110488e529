//! Reads the output of `ib_write_bw`, `ib_write_lat` and the other programs of perftest. It starts none.

use serde::Serialize;

/// MB in perftest's tables is 2^20 bytes.
const MIB_TO_GBIT: f64 = 1_048_576.0 * 8.0 / 1e9;

/// One end of a connection, as perftest prints it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PerftestEnd {
    /// Its LID; 0 on Ethernet.
    pub lid: Option<u32>,
    /// Its GID as text, without leading zeros removed.
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
    /// Message size.
    pub bytes: u64,
    /// Number of messages.
    pub iterations: Option<u64>,
    /// Average bandwidth in Gb/s.
    pub gbps: Option<f64>,
    /// Highest bandwidth in Gb/s.
    pub peak_gbps: Option<f64>,
    /// Lowest latency in microseconds.
    pub min_us: Option<f64>,
    /// Median latency, which perftest calls typical.
    pub median_us: Option<f64>,
    /// 99th percentile of the latency.
    pub p99_us: Option<f64>,
    /// Standard deviation of the latency.
    pub stdev_us: Option<f64>,
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
    /// Lines that report a failure.
    pub failures: Vec<String>,
}

/// Reads an output; lines that are not known are skipped.
pub fn read_perftest(text: &str) -> PerftestReport {
    let mut report = PerftestReport::default();
    let mut columns: Vec<String> = Vec::new();
    let mut is_remote = false;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.ends_with(" Test") {
            report.test = Some(trimmed.to_owned());
        } else if trimmed.starts_with("#bytes") {
            columns = column_names(trimmed);
        } else if !columns.is_empty() && trimmed.starts_with(|c: char| c.is_ascii_digit()) {
            report.rows.extend(read_row(&columns, trimmed));
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

fn column_names(header: &str) -> Vec<String> {
    let joined = header
        .replace("BW peak", "BW_peak")
        .replace("BW average", "BW_average")
        .replace("% percentile", "%_percentile");
    joined.split_whitespace().map(str::to_owned).collect()
}

fn read_row(columns: &[String], line: &str) -> Option<PerftestRow> {
    let mut row = PerftestRow::default();
    for (column, word) in columns.iter().zip(line.split_whitespace()) {
        let number: f64 = word.parse().ok()?;
        let gbps = if column.contains("MB/sec") { number * MIB_TO_GBIT } else { number };
        let whole = || (number >= 0.0 && number.fract() == 0.0).then_some(number as u64);
        match column.split('[').next().unwrap_or_default() {
            "#bytes" => row.bytes = whole()?,
            "#iterations" => row.iterations = whole(),
            "BW_peak" => row.peak_gbps = Some(gbps),
            "BW_average" => row.gbps = Some(gbps),
            "t_min" => row.min_us = Some(number),
            "t_typical" => row.median_us = Some(number),
            "99%_percentile" => row.p99_us = Some(number),
            "t_stdev" => row.stdev_us = Some(number),
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
