//! The workers of a run, a process on each host, here or over ssh: orders, answers, and the end. Knows no figures.

use super::worker::WorkerOrder;
use crate::error::{BenchError, Result};
use crate::fleet::AgentHost;
use crate::stop;
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Longest wait of an interrupted run for a worker to remove files.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest time without a line from a worker that writes or reads; progress comes four times in a second.
const WORKER_SILENCE_LIMIT: Duration = Duration::from_secs(600);
/// Lines of standard error that a message carries.
const ERROR_LINES: usize = 4;

/// A worker.
struct Worker {
    host: String,
    child: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<String>,
    errors: Receiver<String>,
}

/// All workers, ended when dropped.
pub struct WorkerCrew {
    workers: Vec<Worker>,
}

impl WorkerCrew {
    /// Starts a worker on each host, or a worker here where no host is named.
    ///
    /// # Errors
    /// `Missing` without ssh; a host that does not answer shows with the first order.
    pub fn start(me: &Path, hosts: &[AgentHost]) -> Result<WorkerCrew> {
        let mut crew = WorkerCrew { workers: Vec::new() };
        if hosts.is_empty() {
            let mut command = Command::new(me);
            command.args(["part", "checkpoint-worker"]);
            crew.workers.push(Worker::start("this host", command)?);
        }
        for host in hosts {
            let command = host.piped_command(&["spurline", "bench", "part", "checkpoint-worker"])?;
            crew.workers.push(Worker::start(&host.host, command)?);
        }
        Ok(crew)
    }

    /// Number of workers.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// The names of the workers' hosts.
    pub fn hosts(&self) -> Vec<&str> {
        self.workers.iter().map(|worker| worker.host.as_str()).collect()
    }

    /// Sends an order to each worker, then waits for all answers. `progress` gets the bytes of all workers so far.
    ///
    /// # Errors
    /// The first failure; `Interrupted` when the user ends the run.
    pub fn order_all(
        &mut self,
        order: impl Fn(usize) -> WorkerOrder,
        mut progress: impl FnMut(u64),
    ) -> Result<Vec<Value>> {
        for (index, worker) in self.workers.iter_mut().enumerate() {
            worker.send(&order(index))?;
        }
        let mut bytes = vec![0; self.workers.len()];
        let mut done: Vec<Option<Value>> = vec![None; self.workers.len()];
        let mut heard = Instant::now();
        while done.iter().any(Option::is_none) {
            stop::check_stop()?;
            let mut silent = true;
            for (index, worker) in self.workers.iter_mut().enumerate() {
                if done[index].is_some() {
                    continue;
                }
                let Some(line) = worker.next_line()? else { continue };
                silent = false;
                match worker.read_line(&line)? {
                    WorkerLine::Progress(now) => bytes[index] = now,
                    WorkerLine::Done(value) => done[index] = Some(value),
                }
            }
            if silent {
                if heard.elapsed() > WORKER_SILENCE_LIMIT {
                    let quiet: Vec<&str> = self
                        .workers
                        .iter()
                        .zip(&done)
                        .filter(|(_, done)| done.is_none())
                        .map(|(w, _)| w.host.as_str())
                        .collect();
                    return Err(BenchError::Failed(format!(
                        "no answer from {} for {} s",
                        quiet.join(", "),
                        WORKER_SILENCE_LIMIT.as_secs()
                    )));
                }
                progress(bytes.iter().sum());
                std::thread::sleep(Duration::from_millis(5));
            } else {
                heard = Instant::now();
            }
        }
        Ok(done.into_iter().flatten().collect())
    }

    /// As [`WorkerCrew::order_all`], for a single worker.
    ///
    /// # Errors
    /// The same.
    pub fn order_one(&mut self, index: usize, order: &WorkerOrder) -> Result<Value> {
        let worker = &mut self.workers[index];
        worker.send(order)?;
        loop {
            let line = stop::wait_until(
                &format!("an answer from {}", worker.host),
                WORKER_SILENCE_LIMIT,
                Duration::from_millis(2),
                || worker.next_line(),
            )?;
            if let WorkerLine::Done(value) = worker.read_line(&line)? {
                return Ok(value);
            }
        }
    }
}

impl Drop for WorkerCrew {
    fn drop(&mut self) {
        // A worker removes its files at the end of the input.
        self.workers.iter_mut().for_each(|worker| worker.orders = None);
        let end = Instant::now() + CLEANUP_TIMEOUT;
        for worker in &mut self.workers {
            while matches!(worker.child.try_wait(), Ok(None)) {
                if Instant::now() >= end {
                    anstream::eprintln!("the worker on {} does not end: its files may be left behind", worker.host);
                    let _ = worker.child.kill();
                    let _ = worker.child.wait();
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// A line of a worker.
enum WorkerLine {
    Progress(u64),
    Done(Value),
}

impl Worker {
    fn start(host: &str, mut command: Command) -> Result<Worker> {
        // A Ctrl-C at the terminal ends this process only, which then closes the workers' input; so does its death.
        let mut child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| BenchError::io(format_args!("can't start a worker on {host}"), &e))?;
        let orders = child.stdin.take();
        let answers = lines_of(child.stdout.take());
        let errors = lines_of(child.stderr.take());
        Ok(Worker { host: host.to_owned(), child, orders, answers, errors })
    }

    fn send(&mut self, order: &WorkerOrder) -> Result<()> {
        let line =
            serde_json::to_string(order).map_err(|e| BenchError::Failed(format!("an order can't be made: {e}")))?;
        let sent = self.orders.as_mut().map(|pipe| writeln!(pipe, "{line}").and_then(|()| pipe.flush()));
        // A worker that is gone gives the reason on standard error.
        if matches!(sent, Some(Ok(()))) { Ok(()) } else { Err(self.why_gone()) }
    }

    fn next_line(&mut self) -> Result<Option<String>> {
        match self.answers.try_recv() {
            Ok(line) => Ok(Some(line)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(self.why_gone()),
        }
    }

    fn read_line(&self, line: &str) -> Result<WorkerLine> {
        let host = &self.host;
        let read: Value = serde_json::from_str(line).map_err(|_| {
            BenchError::Missing(format!("{host} printed '{line}' instead of an answer: is spurline installed there?"))
        })?;
        if let Some(bytes) = read["progress"].as_u64() {
            return Ok(WorkerLine::Progress(bytes));
        }
        let on = |why: &str| if host == "this host" { why.to_owned() } else { format!("{host}: {why}") };
        match (read["missing"].as_str(), read["failed"].as_str()) {
            (Some(why), _) => Err(BenchError::Missing(on(why))),
            (None, Some(why)) => Err(BenchError::Failed(on(why))),
            (None, None) => Ok(WorkerLine::Done(read["done"].clone())),
        }
    }

    fn why_gone(&mut self) -> BenchError {
        // The last words may still be on the way.
        let end = Instant::now() + Duration::from_secs(2);
        let mut said = Vec::new();
        while let Ok(line) = self.errors.recv_timeout(end.saturating_duration_since(Instant::now())) {
            said.push(line);
        }
        let tail = said[said.len().saturating_sub(ERROR_LINES)..].join(" | ");
        let host = &self.host;
        BenchError::Missing(format!(
            "the worker on {host} has ended: {tail}; it is 'spurline bench part checkpoint-worker' of the same build"
        ))
    }
}

fn lines_of(pipe: Option<impl std::io::Read + Send + 'static>) -> Receiver<String> {
    let (tx, rx) = channel();
    std::thread::spawn(move || {
        let Some(pipe) = pipe else { return };
        for line in BufReader::new(pipe).lines() {
            let Ok(line) = line else { return };
            if tx.send(line).is_err() {
                return;
            }
        }
    });
    rx
}
