//! Replays a training job's reading: for each emulated accelerator, reader threads that fetch whole batches and a thread that
//! sleeps for the time a step computes. Knows neither the source of the files nor the requirement.

use super::data_set::{DataFile, next_uniform};
use super::model::TrainLoad;
use crate::error::{BenchError, Result};
use crate::stop;
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of a read, as numpy and TensorFlow read.
const READ_BYTES: usize = 256 << 10;
/// Batches that each reader thread may have ready: PyTorch's prefetch factor.
const PREFETCH_BATCHES: usize = 2;
/// Longest wait for the first batch of every accelerator.
const FIRST_BATCH: Duration = Duration::from_secs(120);
/// Interval of the throughput over time.
const TRAIN_SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

/// The load of a replay.
pub struct ReplayPlan<'a> {
    /// The load.
    pub load: &'a TrainLoad,
    /// The folder of the files.
    pub dir: &'a Path,
    /// The files.
    pub files: &'a [DataFile],
    /// Emulated accelerators.
    pub accelerators: usize,
    /// Time that a step computes; zero measures how fast batches can be read.
    pub compute: Duration,
    /// Length of the measurement, which begins when every accelerator has computed once.
    pub time: Duration,
    /// Number of the order of the files.
    pub seed: u64,
}

/// The figures of a replay.
#[derive(Debug, Clone, Default)]
pub struct ReplayFigures {
    /// Length of the measurement in seconds.
    pub seconds: f64,
    /// Bytes read.
    pub bytes: u64,
    /// Files opened.
    pub opens: u64,
    /// Steps of all accelerators.
    pub steps: u64,
    /// Share of the time that each accelerator computed.
    pub utilisations: Vec<f64>,
    /// Bytes per second over time: seconds since the start of the measurement, and the rate.
    pub over_time: Vec<(f64, f64)>,
}

impl ReplayFigures {
    /// The mean utilisation.
    pub fn utilisation(&self) -> f64 {
        self.utilisations.iter().sum::<f64>() / self.utilisations.len().max(1) as f64
    }
}

/// The order of the files: shuffled anew for each epoch, shared by all readers.
struct EpochOrder {
    order: Vec<usize>,
    next: usize,
    random: u64,
}

impl EpochOrder {
    fn new(files: usize, seed: u64) -> Self {
        let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        EpochOrder { order: (0..files).collect(), next: files, random }
    }

    fn take_file(&mut self) -> usize {
        if self.next >= self.order.len() {
            for last in (1..self.order.len()).rev() {
                let other = (next_uniform(&mut self.random) * (last + 1) as f64) as usize;
                self.order.swap(last, other.min(last));
            }
            self.next = 0;
        }
        self.next += 1;
        self.order[self.next - 1]
    }
}

/// What all threads share.
struct ReplayState<'a> {
    plan: &'a ReplayPlan<'a>,
    order: Mutex<EpochOrder>,
    bytes: AtomicU64,
    opens: AtomicU64,
    /// Accelerators that have computed once.
    started: AtomicU64,
    measure: AtomicBool,
    stop: AtomicBool,
    failure: Mutex<Option<BenchError>>,
}

impl ReplayState<'_> {
    fn fail(&self, error: BenchError) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error);
        self.stop.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Opens the next file of the epoch.
    fn open_next(&self) -> Result<OpenDataFile> {
        let index = self.order.lock().unwrap_or_else(PoisonError::into_inner).take_file();
        let known = &self.plan.files[index];
        let path = self.plan.dir.join(&known.name);
        let file = File::open(&path).map_err(|e| BenchError::io(path.display(), &e))?;
        // Real data sets are larger than the memory: an earlier epoch's pages must not serve this epoch. A file system without
        // the call keeps such pages, which the counters then show.
        let _ = fadvise(&file, 0, None, Advice::DontNeed);
        self.opens.fetch_add(1, Ordering::Relaxed);
        Ok(OpenDataFile { file, at: 0, len: known.len })
    }
}

/// A file being read.
struct OpenDataFile {
    file: File,
    at: u64,
    len: u64,
}

impl OpenDataFile {
    /// Reads the next piece of at most `most` bytes; 0 at the end.
    fn read_piece(&mut self, buffer: &mut [u8], most: u64) -> Result<u64> {
        let wanted = (self.len - self.at).min(most).min(buffer.len() as u64) as usize;
        if wanted == 0 {
            return Ok(0);
        }
        let got = self.file.read_at(&mut buffer[..wanted], self.at).map_err(|e| BenchError::io("a read", &e))?;
        if got == 0 {
            return Err(BenchError::Failed(format!("a file ended at {} instead of {}", self.at, self.len)));
        }
        self.at += got as u64;
        Ok(got as u64)
    }
}

/// A reader thread: reads batches until the stop.
fn read_batches(state: &ReplayState<'_>, ready: &SyncSender<()>) -> Result<()> {
    let load = state.plan.load;
    let mut buffer = vec![0u8; READ_BYTES];
    // Files with many samples are read on across batches.
    let mut kept: Option<OpenDataFile> = None;
    loop {
        if load.samples_per_file == 1 {
            for _ in 0..load.batch {
                let mut file = state.open_next()?;
                while !state.is_stopped() {
                    let got = file.read_piece(&mut buffer, u64::MAX)?;
                    if got == 0 {
                        break;
                    }
                    state.bytes.fetch_add(got, Ordering::Relaxed);
                }
                if state.is_stopped() {
                    return Ok(());
                }
            }
        } else {
            let mut left = (load.batch as f64 * load.sample_bytes) as u64;
            while left > 0 {
                if state.is_stopped() {
                    return Ok(());
                }
                let file = match &mut kept {
                    Some(file) => file,
                    None => kept.insert(state.open_next()?),
                };
                let got = file.read_piece(&mut buffer, left)?;
                if got == 0 {
                    kept = None;
                }
                left -= got;
                state.bytes.fetch_add(got, Ordering::Relaxed);
            }
        }
        // The accelerator ends first.
        if ready.send(()).is_err() {
            return Ok(());
        }
    }
}

/// The share of computing of an accelerator, and the steps.
struct AcceleratorFigures {
    utilisation: f64,
    steps: u64,
}

/// An accelerator: takes a batch, computes, until the stop.
fn compute_steps(state: &ReplayState<'_>, ready: &Receiver<()>) -> AcceleratorFigures {
    let mut window: Option<Instant> = None;
    let mut busy = Duration::ZERO;
    let mut steps = 0;
    let mut first = true;
    while !state.is_stopped() {
        match ready.recv_timeout(Duration::from_millis(20)) {
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        }
        let start = Instant::now();
        if !state.plan.compute.is_zero() {
            std::thread::sleep(state.plan.compute);
        }
        if window.is_some() {
            busy += start.elapsed();
            steps += 1;
        } else if state.measure.load(Ordering::Relaxed) {
            window = Some(Instant::now());
        }
        if std::mem::take(&mut first) {
            state.started.fetch_add(1, Ordering::Relaxed);
        }
    }
    let utilisation = window.map_or(0.0, |since| busy.as_secs_f64() / since.elapsed().as_secs_f64().max(1e-9));
    AcceleratorFigures { utilisation, steps }
}

/// Runs the replay; `begin` is called at the start of the measurement and `end` at the end.
///
/// # Errors
/// When a file can't be read, or the user interrupts.
pub fn run_replay<T>(
    plan: &ReplayPlan<'_>,
    begin: impl FnOnce() -> Result<T>,
    end: impl FnOnce(T) -> Result<()>,
) -> Result<ReplayFigures> {
    let state = ReplayState {
        plan,
        order: Mutex::new(EpochOrder::new(plan.files.len(), plan.seed)),
        bytes: AtomicU64::new(0),
        opens: AtomicU64::new(0),
        started: AtomicU64::new(0),
        measure: AtomicBool::new(false),
        stop: AtomicBool::new(false),
        failure: Mutex::new(None),
    };
    let state = &state;
    std::thread::scope(|scope| {
        let mut accelerators = Vec::new();
        for _ in 0..plan.accelerators {
            let (tx, rx) = sync_channel(PREFETCH_BATCHES * plan.load.threads);
            for _ in 0..plan.load.threads {
                let tx = tx.clone();
                scope.spawn(move || {
                    if let Err(error) = read_batches(state, &tx) {
                        state.fail(error);
                    }
                });
            }
            accelerators.push(scope.spawn(move || compute_steps(state, &rx)));
        }
        let measured = measure_window(state, begin, end);
        if let Err(error) = &measured {
            state.fail(error.clone());
        }
        state.stop.store(true, Ordering::Relaxed);
        let mut figures = measured.unwrap_or_default();
        for accelerator in accelerators {
            if let Ok(done) = accelerator.join() {
                figures.utilisations.push(done.utilisation);
                figures.steps += done.steps;
            }
        }
        match state.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(figures),
        }
    })
}

/// Waits for the first steps, then measures for the planned time.
fn measure_window<T>(
    state: &ReplayState<'_>,
    begin: impl FnOnce() -> Result<T>,
    end: impl FnOnce(T) -> Result<()>,
) -> Result<ReplayFigures> {
    let plan = state.plan;
    let limit = Instant::now() + FIRST_BATCH;
    while state.started.load(Ordering::Relaxed) < plan.accelerators as u64 && !state.is_stopped() {
        stop::check_stop()?;
        // Accelerators that wait this long are starved: the measurement shows that.
        if Instant::now() > limit {
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let token = begin()?;
    let counted = || (state.bytes.load(Ordering::Relaxed), state.opens.load(Ordering::Relaxed));
    let start = Instant::now();
    let before = counted();
    state.measure.store(true, Ordering::Relaxed);
    let mut over_time = Vec::new();
    let mut last = before.0;
    let mut last_at = start;
    while start.elapsed() < plan.time && !state.is_stopped() {
        stop::check_stop()?;
        std::thread::sleep(TRAIN_SAMPLE_INTERVAL.min(plan.time.saturating_sub(start.elapsed())));
        let now = Instant::now();
        let bytes = state.bytes.load(Ordering::Relaxed);
        let rate = (bytes - last) as f64 / now.duration_since(last_at).as_secs_f64().max(1e-9);
        over_time.push((now.duration_since(start).as_secs_f64(), rate));
        last = bytes;
        last_at = now;
    }
    let after = counted();
    let seconds = start.elapsed().as_secs_f64();
    end(token)?;
    let bytes = after.0 - before.0;
    let opens = after.1 - before.1;
    Ok(ReplayFigures { seconds, bytes, opens, over_time, ..ReplayFigures::default() })
}

#[cfg(test)]
mod tests {
    use super::super::data_set::{make_files, plan_files};
    use super::super::model::{AcceleratorName, ModelName};
    use super::*;

    fn replayed(load: &TrainLoad, accelerators: usize, compute: Duration) -> ReplayFigures {
        let dir = tempfile::tempdir().unwrap();
        let files = plan_files(load, 2_000_000);
        make_files(dir.path(), &files).unwrap();
        let time = Duration::from_millis(300);
        let plan = ReplayPlan { load, dir: dir.path(), files: &files, accelerators, compute, time, seed: 7 };
        let (mut begun, mut ended) = (0, 0);
        let begin = || {
            begun += 1;
            Ok(5)
        };
        let figures = run_replay(&plan, begin, |token| {
            ended += token;
            Ok(())
        });
        assert_eq!((begun, ended), (1, 5));
        figures.unwrap()
    }

    #[test]
    fn an_epoch_has_every_file_once_and_another_order_than_the_last() {
        let mut order = EpochOrder::new(50, 3);
        let mut epoch = || (0..50).map(|_| order.take_file()).collect::<Vec<_>>();
        let (first, second) = (epoch(), epoch());
        assert_ne!(first, second);
        for mut one in [first, second] {
            one.sort_unstable();
            assert_eq!(one, (0..50).collect::<Vec<_>>());
        }
    }

    #[test]
    fn accelerators_compute_and_readers_count() {
        let mut load = TrainLoad::find(ModelName::Retinanet, AcceleratorName::B200).unwrap();
        (load.sample_bytes, load.batch, load.threads) = (20_000.0, 3, 2);
        let figures = replayed(&load, 2, Duration::from_millis(10));
        assert_eq!(figures.utilisations.len(), 2);
        assert!(figures.utilisations.iter().all(|share| *share > 0.0 && *share <= 1.0), "{figures:?}");
        assert!(figures.steps > 0 && figures.opens > 0 && figures.bytes > 0 && !figures.over_time.is_empty());
        // Files of many samples, and no computing at all.
        let mut load = TrainLoad::find(ModelName::Resnet50, AcceleratorName::H100).unwrap();
        (load.sample_bytes, load.samples_per_file, load.batch) = (1000.0, 100, 40);
        let figures = replayed(&load, 1, Duration::ZERO);
        assert!(figures.steps > 0 && figures.bytes > figures.opens, "{figures:?}");
    }

    #[test]
    fn a_file_that_is_gone_ends_the_replay() {
        let load = TrainLoad::find(ModelName::Retinanet, AcceleratorName::B200).unwrap();
        let files = plan_files(&load, 1_000_000);
        let (dir, time) = (Path::new("/nowhere"), Duration::from_secs(60));
        let plan = ReplayPlan { load: &load, dir, files: &files, accelerators: 1, compute: time, time, seed: 1 };
        let error = run_replay(&plan, || Ok(()), Ok).unwrap_err().to_string();
        assert!(error.contains("/nowhere"), "{error}");
    }
}
