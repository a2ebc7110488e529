//! Counters per peer and path, declared once with units, as the others are in `stats`. An update is a relaxed atomic add; only
//! the reason of a failure is behind a lock.

use crate::stats::{Metric, MetricKind};
use parking_lot::Mutex;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the counters of an unused path are kept: nodes that return under new names would otherwise accumulate
/// without end.
const KEEP_UNUSED: Duration = Duration::from_secs(600);

macro_rules! path_stats {
    ($( $name:ident : $kind:ident $unit:literal $help:literal ),+ $(,)?) => {
        /// The traffic of a path to a peer.
        #[derive(Debug, Default, Serialize, Deserialize)]
        #[serde(default)]
        pub struct PathStats {
            peer: String,
            path: String,
            transport: String,
            last_failure: Mutex<Option<String>>,
            #[serde(skip)]
            pools: Mutex<Pools>,
            $( #[doc = concat!($help, " Unit: ", $unit, ".")] pub $name: Metric ),+
        }

        impl PathStats {
            fn for_each(&self, mut f: impl FnMut(&'static str, MetricKind, &'static str, &'static str, u64)) {
                $( f(stringify!($name), MetricKind::$kind, $unit, $help, self.$name.get()); )+
            }
        }
    };
}

path_stats! {
    up: Gauge "paths" "Whether the path carries data now: 1 or 0.",
    silent_s: Gauge "seconds" "Time since anything arrived over the path while it carries data, at the last check; 0 otherwise.",
    recv_bytes: Counter "bytes" "Payload bytes received over the path.",
    send_bytes: Counter "bytes" "Payload bytes of requests sent over the path.",
    ops: Counter "operations" "Requests sent over the path.",
    errors: Counter "operations" "Requests on the path that failed.",
    retries: Counter "operations" "Requests sent again over another path because this one failed.",
    lat_us: Counter "microseconds" "Time from request to answer on the path, summed.",
    failovers: Counter "operations" "Times the path failed while it carried data.",
    failbacks: Counter "operations" "Times the path carried data again after a failure.",
    speed_checks: Counter "operations" "Times long reads over the path were compared with those before it failed, with a result.",
    slower: Gauge "paths" "Whether long reads over the path are slower than before it failed: 1 or 0.",
    usual_bytes_per_s: Gauge "bytes per second" "Usual throughput of long reads over the path; 0 when there were too few.",
    checked_bytes_per_s: Gauge "bytes per second" "Their throughput in the last comparison.",
}

/// The states of the connection pools over a path: a pool per source in use.
#[derive(Debug, Default)]
struct Pools {
    up: u64,
    down: u64,
}

impl Pools {
    fn count_mut(&mut self, word: bool) -> &mut u64 {
        if word { &mut self.up } else { &mut self.down }
    }
    /// A single pool that carries data is enough.
    fn combined(&self) -> Option<bool> {
        if self.up > 0 { Some(true) } else { (self.down > 0).then_some(false) }
    }
}

impl PathStats {
    /// Changes a pool's state of the path from `said` to `now`: true when the pool carries data, false when not, `None` when
    /// there is no pool. `changed` is called with the combined state before and after, when that differs; calls are serialised.
    pub fn report_state(
        &self,
        said: Option<bool>,
        now: Option<bool>,
        changed: impl FnOnce(Option<bool>, Option<bool>),
    ) {
        let mut pools = self.pools.lock();
        let before = pools.combined();
        if let Some(word) = said {
            *pools.count_mut(word) -= 1;
        }
        if let Some(word) = now {
            *pools.count_mut(word) += 1;
        }
        let together = pools.combined();
        self.up.set(u64::from(together == Some(true)));
        if before != together {
            changed(before, together);
        }
    }
    /// Records why the path last failed.
    pub fn set_last_failure(&self, why: &str) {
        *self.last_failure.lock() = Some(why.to_owned());
    }
    /// Why the path last failed.
    pub fn last_failure(&self) -> Option<String> {
        self.last_failure.lock().clone()
    }
}

/// Peer, path and transport.
type PathKey = (String, String, String);

#[derive(Debug)]
struct PathRow {
    stats: Arc<PathStats>,
    /// When the path was first found unused.
    unused_since: Option<Instant>,
}

/// Every path that this process uses or used lately.
#[derive(Debug, Default)]
pub struct PathTable(Mutex<BTreeMap<PathKey, PathRow>>);

impl PathTable {
    /// The counters of a path, the same for each call: a path made anew continues to count, unless unused for a while.
    pub fn path_stats(&self, peer: &str, path: &str, transport: &str) -> Arc<PathStats> {
        self.path_stats_at(peer, path, transport, Instant::now())
    }

    fn path_stats_at(&self, peer: &str, path: &str, transport: &str, now: Instant) -> Arc<PathStats> {
        let mut table = self.0.lock();
        let key = (peer.to_owned(), path.to_owned(), transport.to_owned());
        if let Some(row) = table.get_mut(&key) {
            row.unused_since = None;
            return Arc::clone(&row.stats);
        }
        drop_unused(&mut table, now);
        let (peer, path, transport) = key.clone();
        let stats = Arc::new(PathStats { peer, path, transport, ..PathStats::default() });
        table.insert(key, PathRow { stats: Arc::clone(&stats), unused_since: None });
        stats
    }

    fn live_paths(&self, now: Instant) -> Vec<Arc<PathStats>> {
        let mut table = self.0.lock();
        drop_unused(&mut table, now);
        table.values().map(|row| Arc::clone(&row.stats)).collect()
    }

    /// A JSON object for each path.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// The Prometheus text exposition format, the path as labels.
    pub fn to_prometheus(&self, out: &mut String) {
        let paths = self.live_paths(Instant::now());
        let Some(first) = paths.first() else { return };
        first.for_each(|wanted, kind, unit, help, _| {
            let (suffix, kind) = match kind {
                MetricKind::Counter => ("_total", "counter"),
                MetricKind::Gauge => ("", "gauge"),
            };
            let name = format!("spurline_path_{wanted}{suffix}");
            let _ = writeln!(out, "# HELP {name} {help} Unit: {unit}.\n# TYPE {name} {kind}");
            for path in &paths {
                let labels = path.labels();
                path.for_each(|other, _, _, _, value| {
                    if other == wanted {
                        let _ = writeln!(out, "{name}{{{labels}}} {value}");
                    }
                });
            }
        });
        let name = "spurline_path_last_failure_info";
        let _ = writeln!(out, "# HELP {name} Why the path last failed, as a label.\n# TYPE {name} gauge");
        for path in &paths {
            if let Some(reason) = path.last_failure() {
                let _ = writeln!(out, "{name}{{{},reason=\"{}\"}} 1", path.labels(), escape_label(&reason));
            }
        }
    }
}

impl Serialize for PathTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.live_paths(Instant::now()).iter().map(Arc::as_ref))
    }
}

impl<'de> Deserialize<'de> for PathTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let paths = Vec::<PathStats>::deserialize(deserializer)?;
        let rows = paths.into_iter().map(|stats| {
            let key = (stats.peer.clone(), stats.path.clone(), stats.transport.clone());
            (key, PathRow { stats: Arc::new(stats), unused_since: None })
        });
        Ok(PathTable(Mutex::new(rows.collect())))
    }
}

/// Drops entries unused for long. A reader of the table holds a row for a moment, which does not restart the row's time.
fn drop_unused(table: &mut BTreeMap<PathKey, PathRow>, now: Instant) {
    table.retain(|_, row| {
        if Arc::strong_count(&row.stats) > 1 {
            return true;
        }
        now.saturating_duration_since(*row.unused_since.get_or_insert(now)) < KEEP_UNUSED
    });
}

impl PathStats {
    fn labels(&self) -> String {
        format!(
            "peer=\"{}\",path=\"{}\",transport=\"{}\"",
            escape_label(&self.peer),
            escape_label(&self.path),
            escape_label(&self.transport)
        )
    }
}

/// A label's value in the escaping of the exposition format.
fn escape_label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_counted_on_and_shown_with_its_labels() {
        let table = PathTable::default();
        let mut out = String::new();
        table.to_prometheus(&mut out);
        assert_eq!((out.as_str(), table.to_json()), ("", serde_json::json!([])));
        table.path_stats("n:7000", "ib0-ib1", "rdma").recv_bytes.add(5);
        table.path_stats("n:7000", "ib0-ib1", "rdma").recv_bytes.add(2);
        table.path_stats("n:7000", "tcp", "tcp").ops.add(1);
        table.path_stats("n:7000", "ib0-ib1", "rdma").set_last_failure("said \"no\"\n");
        let json = table.to_json();
        assert_eq!(
            (json[0]["recv_bytes"].as_u64(), json[1]["ops"].as_u64(), json[2].is_null()),
            (Some(7), Some(1), true)
        );
        assert_eq!((&json[0]["last_failure"], &json[1]["last_failure"]), (&"said \"no\"\n".into(), &().into()));
        table.to_prometheus(&mut out);
        let labels = "{peer=\"n:7000\",path=\"ib0-ib1\",transport=\"rdma\"";
        assert!(out.contains(&format!("\nspurline_path_recv_bytes_total{labels}}} 7\n")), "{out}");
        let info = format!("\nspurline_path_last_failure_info{labels},reason=\"said \\\"no\\\"\\n\"}} 1\n");
        assert!(out.contains(&info), "{out}");
        assert_eq!(out.matches("# TYPE spurline_path_ops_total counter\n").count(), 1);
    }

    #[test]
    fn a_path_is_up_while_one_of_its_pools_says_so() {
        let path = PathStats::default();
        let mut log = Vec::new();
        let mut says = |said, now| {
            path.report_state(said, now, |before, together| log.push((before, together)));
            path.up.get()
        };
        assert_eq!(says(None, Some(true)), 1);
        assert_eq!(says(None, Some(false)), 1, "another pool still carries data");
        assert_eq!(says(Some(true), Some(false)), 0);
        assert_eq!(says(Some(false), Some(true)), 1);
        assert_eq!(says(Some(true), Some(true)), 1);
        assert_eq!(says(Some(true), None), 0);
        assert_eq!(says(Some(false), None), 0);
        let (up, down) = (Some(true), Some(false));
        assert_eq!(log, [(None, up), (up, down), (down, up), (up, down), (down, None)]);
    }

    #[test]
    fn paths_that_nobody_uses_are_forgotten_after_a_while() {
        let (table, start) = (PathTable::default(), Instant::now());
        let after = |parts: u32| start + KEEP_UNUSED * parts / 4;
        let names = |at| table.live_paths(at).iter().map(|path| path.peer.clone()).collect::<Vec<_>>();
        let held = table.path_stats_at("held", "tcp", "tcp", start);
        let back = table.path_stats_at("back", "tcp", "tcp", start);
        back.ops.add(3);
        let pods: Vec<_> = (0..9).map(|n| table.path_stats_at(&format!("pod-{n}"), "tcp", "tcp", start)).collect();
        drop((pods, back));
        let looked = table.live_paths(after(1));
        assert_eq!((looked.len(), names(after(2)).len()), (11, 11));
        drop(looked);
        assert_eq!(table.path_stats_at("back", "tcp", "tcp", after(3)).ops.get(), 3);
        assert_eq!(names(after(4)).len(), 11);
        assert_eq!(names(after(6)), ["back", "held"]);
        assert_eq!(table.path_stats_at("back", "tcp", "tcp", after(7)).ops.get(), 3);
        assert_eq!(names(after(8)), ["back", "held"]);
        assert_eq!(names(after(12)), ["held"]);
        drop(held);
        // New paths remove old ones, too, without any reader of the table.
        table.path_stats_at("new", "tcp", "tcp", after(13));
        table.path_stats_at("newer", "tcp", "tcp", after(17));
        assert_eq!(names(after(17)), ["new", "newer"]);
    }
}
