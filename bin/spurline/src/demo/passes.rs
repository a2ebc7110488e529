//! A pass of readers over the mounted data set, and the figures.

use super::DemoControl;
use super::dataset::{DemoDataset, SampleFile};
use super::stage::StageCounters;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_types::stats::Metric;
use spurline_types::units::human_bytes;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// How often a waiting pass checks for the stop.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The readers' results.
pub struct ReadAll {
    time: Duration,
    bytes: u64,
    files: usize,
}

enum ReaderMessage {
    Bytes(u64),
    Done,
    Failed(Fault),
}

/// Reads every file through the mount and compares the checksum.
///
/// # Errors
/// When a read fails, a checksum differs, reads stall for too long, or the user interrupts.
pub fn read_all(
    what: &'static str,
    mountpoint: &Path,
    dataset: &DemoDataset,
    readers: usize,
    control: &Arc<DemoControl>,
) -> Result<ReadAll, Fault> {
    let bar = control.progress_bar(what, dataset.bytes);
    let files: Arc<Vec<SampleFile>> = Arc::new(dataset.files.clone());
    let next = Arc::new(AtomicUsize::new(0));
    let (sender, receiver) = channel();
    let start = Instant::now();
    // Not joined: a reader that blocks in the mount ends when the mount is removed.
    for _ in 0..readers {
        let files = Arc::clone(&files);
        let next = Arc::clone(&next);
        let sender = sender.clone();
        let root: PathBuf = mountpoint.to_owned();
        let control = Arc::clone(control);
        std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 20];
            while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                let told = match read_one(&root, file, &mut buffer, &sender, &control) {
                    Ok(()) => ReaderMessage::Done,
                    Err(fault) => ReaderMessage::Failed(fault),
                };
                if sender.send(told).is_err() {
                    return;
                }
            }
        });
    }
    drop(sender);
    let result = wait_for_readers(&receiver, &bar, control, files.len());
    bar.finish_and_clear();
    result?;
    Ok(ReadAll { time: start.elapsed(), bytes: dataset.bytes, files: files.len() })
}

fn wait_for_readers(
    receiver: &std::sync::mpsc::Receiver<ReaderMessage>,
    bar: &ProgressBar,
    control: &DemoControl,
    files: usize,
) -> Result<(), Fault> {
    let mut done = 0;
    let mut moved = Instant::now();
    while done < files {
        control.go_on()?;
        match receiver.recv_timeout(STOP_CHECK_INTERVAL) {
            Ok(told) => {
                moved = Instant::now();
                match told {
                    ReaderMessage::Bytes(n) => bar.inc(n),
                    ReaderMessage::Done => done += 1,
                    ReaderMessage::Failed(fault) => return Err(fault),
                }
            }
            Err(RecvTimeoutError::Timeout) if moved.elapsed() < control.limit => {}
            Err(RecvTimeoutError::Timeout) => {
                let text = format!("no byte came through the mount for {} s", control.limit.as_secs());
                return Err(Fault::failed(text, "the logs of node and mount are shown above; --timeout waits longer"));
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    Ok(())
}

fn read_one(
    root: &Path,
    sample: &SampleFile,
    buffer: &mut [u8],
    sender: &Sender<ReaderMessage>,
    control: &DemoControl,
) -> Result<(), Fault> {
    let path = root.join(&sample.path);
    let mut file = File::open(&path).map_err(|e| Fault::failed(format!("reading {}: {e}", path.display()), ""))?;
    let mut hash = Xxh3::new();
    let mut total = 0;
    loop {
        control.go_on()?;
        let n = file.read(buffer).map_err(|e| Fault::failed(format!("reading {}: {e}", path.display()), ""))?;
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
        total += n as u64;
        let _ = sender.send(ReaderMessage::Bytes(n as u64));
    }
    if (total, hash.digest()) != (sample.bytes, sample.checksum) {
        let text = format!(
            "{} is not what was written: {total} of {} bytes, or another checksum",
            path.display(),
            sample.bytes
        );
        return Err(Fault::failed(text, "this is a bug; please report it with the output of spurline info"));
    }
    Ok(())
}

/// The figures of a pass.
pub struct DemoPass {
    /// `cold` or `hot`.
    pub name: &'static str,
    read: ReadAll,
    under: u64,
    remote: u64,
    node_cpu: Duration,
    mount_cpu: Duration,
}

impl DemoPass {
    /// From the counters of node and mount before and after.
    pub fn new(name: &'static str, read: ReadAll, before: &StageCounters, after: &StageCounters) -> Self {
        DemoPass {
            name,
            read,
            under: counter_growth(after, before, |counters| &counters.node.object.get_bytes),
            remote: counter_growth(after, before, |counters| &counters.mount.remotecache.recv_bytes),
            node_cpu: Duration::from_micros(counter_growth(after, before, |counters| &counters.node.usage.cpu_us)),
            mount_cpu: Duration::from_micros(counter_growth(after, before, |counters| &counters.mount.usage.cpu_us)),
        }
    }

    fn seconds(&self) -> f64 {
        self.read.time.as_secs_f64().max(1e-6)
    }

    /// As cells of the table.
    pub fn row(&self) -> [String; 8] {
        let rate = human_bytes((self.read.bytes as f64 / self.seconds()) as u64);
        [
            self.name.to_owned(),
            format!("{rate}/s"),
            format!("{:.0}", self.read.files as f64 / self.seconds()),
            format!("{:.2} s", self.seconds()),
            human_bytes(self.under),
            human_bytes(self.remote),
            format!("{:.2} s", self.node_cpu.as_secs_f64()),
            format!("{:.2} s", self.mount_cpu.as_secs_f64()),
        ]
    }

    pub fn to_json(&self) -> Value {
        json!({
            "name": self.name, "seconds": self.seconds(), "bytes": self.read.bytes, "files": self.read.files,
            "bytes_per_second": self.read.bytes as f64 / self.seconds(),
            "under_store_bytes": self.under, "remote_bytes": self.remote,
            "node_cpu_seconds": self.node_cpu.as_secs_f64(), "mount_cpu_seconds": self.mount_cpu.as_secs_f64(),
        })
    }
}

fn counter_growth(after: &StageCounters, before: &StageCounters, metric_of: fn(&StageCounters) -> &Metric) -> u64 {
    metric_of(after).get().saturating_sub(metric_of(before).get())
}
