//! Counters per peer and path, declared once with their units as the others are in `stats`. Updating one is a relaxed
//! atomic add; only the reason of a failure is behind a lock.

use crate::stats::{Metric, MetricKind};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

macro_rules! path_stats {
    ($( $name:ident : $kind:ident $unit:literal $help:literal ),+ $(,)?) => {
        /// What one path to one peer carried.
        #[derive(Debug, Default)]
        pub struct PathStats {
            peer: String,
            path: String,
            transport: String,
            last_failure: Mutex<Option<String>>,
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
    silent_s: Gauge "seconds" "How long ago anything came over the path while it carries data, as last looked at; 0 otherwise.",
    recv_bytes: Counter "bytes" "Payload bytes received over the path.",
    ops: Counter "operations" "Requests sent over the path.",
    errors: Counter "operations" "Requests on the path that failed.",
    retries: Counter "operations" "Requests that were sent again elsewhere because the path failed.",
    lat_us: Counter "microseconds" "Time from request to answer on the path, summed.",
    failovers: Counter "operations" "Times the path failed while it carried data.",
    failbacks: Counter "operations" "Times the path carried data again after a failure.",
    speed_checks: Counter "operations" "Times long reads over the path were compared with those before it failed, with a result.",
    slower: Gauge "paths" "Whether long reads over the path are slower than before it failed: 1 or 0.",
    usual_bytes_per_s: Gauge "bytes per second" "What long reads move over the path, as a rule; 0 when there were too few.",
    checked_bytes_per_s: Gauge "bytes per second" "What they moved when they were last compared.",
}

impl PathStats {
    /// Remembers why the path last failed.
    pub fn set_last_failure(&self, why: &str) {
        *lock(&self.last_failure) = Some(why.to_owned());
    }
    /// Why the path last failed.
    pub fn last_failure(&self) -> Option<String> {
        lock(&self.last_failure).clone()
    }
}

/// Every path this process knows or knew.
#[derive(Debug, Default)]
pub struct PathTable(Mutex<Vec<Arc<PathStats>>>);

impl PathTable {
    /// The counters of a path, the same ones each time it is asked for: a path made anew counts on.
    pub fn of(&self, peer: &str, path: &str, transport: &str) -> Arc<PathStats> {
        let mut table = lock(&self.0);
        if let Some(known) = table.iter().find(|p| p.peer == peer && p.path == path && p.transport == transport) {
            return Arc::clone(known);
        }
        let (peer, path, transport) = (peer.to_owned(), path.to_owned(), transport.to_owned());
        let made = Arc::new(PathStats { peer, path, transport, ..PathStats::default() });
        table.push(Arc::clone(&made));
        made
    }

    fn all(&self) -> Vec<Arc<PathStats>> {
        lock(&self.0).clone()
    }

    /// One JSON object a path.
    pub fn to_json(&self) -> serde_json::Value {
        let object = |path: &Arc<PathStats>| {
            let mut object = serde_json::Map::new();
            object.insert("peer".into(), path.peer.as_str().into());
            object.insert("path".into(), path.path.as_str().into());
            object.insert("transport".into(), path.transport.as_str().into());
            path.for_each(|name, _, _, _, value| {
                object.insert(name.into(), value.into());
            });
            object.insert("last_failure".into(), path.last_failure().into());
            serde_json::Value::Object(object)
        };
        self.all().iter().map(object).collect()
    }

    /// The Prometheus text exposition format, the path as labels.
    pub fn to_prometheus(&self, out: &mut String) {
        let paths = self.all();
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
                let _ = writeln!(out, "{name}{{{},reason=\"{}\"}} 1", path.labels(), escaped(&reason));
            }
        }
    }
}

impl PathStats {
    fn labels(&self) -> String {
        format!(
            "peer=\"{}\",path=\"{}\",transport=\"{}\"",
            escaped(&self.peer),
            escaped(&self.path),
            escaped(&self.transport)
        )
    }
}

/// A label's value as the exposition format wants it.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Numbers are right whatever a thread was doing when it panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        table.of("n:7000", "ib0-ib1", "rdma").recv_bytes.add(5);
        table.of("n:7000", "ib0-ib1", "rdma").recv_bytes.add(2);
        table.of("n:7000", "tcp", "tcp").ops.add(1);
        table.of("n:7000", "ib0-ib1", "rdma").set_last_failure("said \"no\"\n");
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
}
