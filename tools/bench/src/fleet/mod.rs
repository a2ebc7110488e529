//! `bench fio`: a job file on many hosts at once, each with a fio server, in turn over several mounts (such as TCP and RDMA).
//! This module runs and reports the matrix.

mod agents;
mod failure;
mod job_file;
mod nfs;
mod outcome;

use crate::child::{self, FinishedChild, ServerProcess};
use crate::cost::{RoleCounters, RunCost, rates_json};
use crate::error::{BenchError, Result};
use crate::mount::{CounterValues, parse_counters, query_counters};
use crate::numbers::{known_digits, median, median_known, median_of, three_digits};
use crate::places::split_name;
use crate::plot::{BenchChart, ChartSeries};
use crate::report::{CommandReport, ReportOutputs};
use crate::workplace::Workplace;
use crate::{machine, stop};
pub use agents::AgentHost;
use failure::FailedJob;
use nfs::{NfsCase, NfsExport, NfsMounts, NfsVariant, perftest_program, run_perftest};
use outcome::FleetFigures;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The arguments of `bench fio`.
#[derive(Debug, clap::Args)]
pub struct FleetArgs {
    /// Hosts that run the job at once, HOST or HOST:PORT (default 8765), with commas between; localhost gets a fio
    /// server for this run
    #[arg(long, value_name = "HOST[,HOST]", value_delimiter = ',', default_value = "localhost")]
    pub hosts: Vec<String>,
    /// Job file of fio, or the name of a shipped one
    #[arg(long, value_name = "FILE", default_value = "seq-read-1m")]
    pub job: String,
    /// Folder on every host that the job reads or writes, with a name for reports; repeat for more, which run in turn
    #[arg(long, value_name = "[NAME=]DIR", required_unless_present_any = ["list_jobs", "print_job", "nfs"])]
    pub dir: Vec<String>,
    /// Export of an NFS server, mounted on the hosts for each run, in each of ten cases; repeat for more, which are compared
    /// with the first, case by case
    #[arg(long, value_name = "[NAME=]HOST[,HOST]:/PATH")]
    pub nfs: Vec<String>,
    /// NFS cases: v3 or v4, tcp or rdma, then -nconnect, or -addresses with v4 [default: all ten]
    #[arg(long, value_name = "CASE[,CASE]", value_delimiter = ',', requires = "nfs")]
    pub nfs_case: Vec<String>,
    /// Connections of the cases with -nconnect
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=16))]
    pub nconnect: u32,
    /// Hosts of the NFS server, for their processor time: over ssh with --ssh, else localhost [default: it is not measured]
    #[arg(long, value_name = "HOST[,HOST]", value_delimiter = ',', requires = "nfs")]
    pub server_host: Vec<String>,
    /// Measure ib_write_bw (for reads) or ib_read_bw (for writes) to the NFS server in the same run
    #[arg(long, requires = "nfs")]
    pub perftest: bool,
    /// Start the fio servers over ssh for this run [default: they run already, by fio --server]
    ///
    /// Then the counters of the mounts are read over ssh too.
    #[arg(long)]
    pub ssh: bool,
    /// Numbers of hosts to use, one after the other [default: all]
    #[arg(long, value_name = "N[,N]", value_delimiter = ',')]
    pub clients: Vec<usize>,
    /// Processes on each host, one number after the other: JOBS in the job file
    #[arg(long, value_name = "N[,N]", value_delimiter = ',', default_value = "1")]
    pub jobs: Vec<u32>,
    /// Requests of each process at once, one number after the other: DEPTH in the job file
    #[arg(long, value_name = "N[,N]", value_delimiter = ',', default_value = "1")]
    pub depth: Vec<u32>,
    /// Length of one run: TIME in the job file
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = spurline_types::parse_duration)]
    pub time: Duration,
    /// Size of each file: SIZE in the job file
    #[arg(long, value_name = "SIZE", default_value = "1g")]
    pub size: String,
    /// Value of another ${NAME} in the job file; repeat for more
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// Rounds, all folders in turn; medians are reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: u32,
    /// Mounts, for their processor time and bytes: metrics pages HOST:PORT, or mountpoints of this machine [default: none, with
    /// --ssh over ssh]
    #[arg(long, value_name = "ADDR[,ADDR]", value_delimiter = ',')]
    pub mounts: Vec<String>,
    /// Metrics pages of the nodes, HOST:PORT, for their processor time
    #[arg(long, value_name = "ADDR[,ADDR]", value_delimiter = ',')]
    pub nodes: Vec<String>,
    /// Forms of the report.
    #[command(flatten)]
    pub report: ReportOutputs,
    /// List the shipped job files
    #[arg(long)]
    pub list_jobs: bool,
    /// Print a job file
    #[arg(long, value_name = "NAME", conflicts_with = "list_jobs")]
    pub print_job: Option<String>,
    /// Folder for fio's logs
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    pub work_dir: PathBuf,
    /// The spurline that reads counters [default: the one beside this program, or in PATH]
    #[arg(long, value_name = "FILE")]
    pub spurline: Option<PathBuf>,
}

/// A folder under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FleetVariant {
    name: String,
    dir: String,
    /// The mount at the folder for a run.
    nfs: Option<NfsVariant>,
}

/// A point of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FleetPoint {
    clients: usize,
    jobs: u32,
    depth: u32,
}

/// A run of a variant.
#[derive(Debug, Clone)]
struct FleetRun {
    figures: FleetFigures,
    cost: RunCost,
    /// Connections that the kernel's NFS client made, by transport.
    connections: BTreeMap<String, usize>,
}

/// All runs of a variant at a point.
struct FleetRow {
    variant: FleetVariant,
    point: FleetPoint,
    runs: Vec<FleetRun>,
}

impl FleetRow {
    fn bandwidth(&self) -> f64 {
        median_of(&self.runs, |run| run.figures.all.fio.bandwidth)
    }

    fn iops(&self) -> f64 {
        median_of(&self.runs, |run| run.figures.all.fio.iops)
    }

    /// Processor seconds of a role for each GiB; `None` where unknown.
    fn cpu_per_gib(&self, role: &str) -> Option<f64> {
        median_known(&self.runs, |run| run.cost.cpu_per_gib(role, run.figures.all.fio.bytes))
    }
}

impl FleetPoint {
    fn describe(&self) -> String {
        format!("{} hosts, {} jobs, depth {}", self.clients, self.jobs, self.depth)
    }
}

/// `machine` is the whole work of the hosts, and `server` that of the NFS server's hosts: the kernel's NFS belongs to no process.
const FLEET_ROLES: [&str; 5] = ["fio", "mounts", "nodes", "machine", "server"];

/// The transport that carried the bytes of a run, by the counters of the mounts.
const CARRIED_BYTES: [(&str, &str); 2] =
    [("mounts.rdma.recv_bytes", "over rdma"), ("mounts.tcp.recv_bytes", "over tcp")];

/// Further tries after a lost connection.
const RECONNECT_ATTEMPTS: usize = 3;

/// A run of the command.
struct FleetBench<'a> {
    args: &'a FleetArgs,
    hosts: Vec<AgentHost>,
    servers: Vec<AgentHost>,
    job: String,
    values: Vec<(String, String)>,
    work: Workplace,
}

/// Runs the command.
pub fn run(args: &FleetArgs) -> Result<()> {
    if args.list_jobs {
        anstream::print!("{}", job_file::list_jobs());
        return Ok(());
    }
    if let Some(name) = &args.print_job {
        anstream::print!("{}", job_file::load_job(name)?);
        return Ok(());
    }
    stop::catch_signals()?;
    args.report.check_places()?;
    child::require_program("fio", "fio")?;
    let mut variants = args.dir.iter().map(|text| parse_variant(text)).collect::<Result<Vec<_>>>()?;
    let hosts = args.hosts.iter().map(|text| AgentHost::parse(text)).collect::<Result<Vec<_>>>()?;
    let servers = args.server_host.iter().map(|text| AgentHost::parse(text)).collect::<Result<Vec<_>>>()?;
    if !args.ssh && !servers.iter().all(AgentHost::is_here) {
        return Err(BenchError::Usage("--server-host: give --ssh, or localhost for this machine".to_owned()));
    }
    let points = matrix_points(args, hosts.len())?;
    let work = Workplace::new(&args.work_dir, "fio", "--work-dir", args.spurline.as_deref())?;
    if !args.mounts.is_empty() || !args.nodes.is_empty() {
        work.spurline()?;
    }
    if hosts.iter().any(AgentHost::is_here) {
        check_folders(&variants)?;
    }
    let job = job_file::load_job(&args.job)?;
    let values = given_values(args)?;
    let bench = FleetBench { args, hosts, servers, job, values, work };
    variants.extend(bench.nfs_variants()?);
    // All variables have values before anything is started.
    for variant in &variants {
        bench.job_text(variant, points[0])?;
    }
    nfs::busy_of(&bench.servers, args.ssh)?;
    let agents = bench.open_agents()?;
    let mut rows = Vec::new();
    let mut fabric = Vec::new();
    for point in &points {
        rows.extend(bench.run_point(&variants, *point, &mut fabric)?);
    }
    drop(agents);
    report(args, &bench, &rows, &fabric)
}

fn parse_variant(text: &str) -> Result<FleetVariant> {
    let (name, dir) = split_name(text);
    if !dir.starts_with('/') || name.is_empty() || dir.contains(['\n', '\r']) {
        return Err(BenchError::Usage(format!("--dir '{text}': give DIR or NAME=DIR with an absolute folder")));
    }
    Ok(FleetVariant { name: name.to_owned(), dir: dir.to_owned(), nfs: None })
}

/// Checks that the folders of this machine are there.
fn check_folders(variants: &[FleetVariant]) -> Result<()> {
    match variants.iter().find(|variant| !Path::new(&variant.dir).is_dir()) {
        None => Ok(()),
        Some(FleetVariant { dir, .. }) => {
            Err(BenchError::Missing(format!("there is no folder {dir}: make it, or give another one to --dir")))
        }
    }
}

fn given_values(args: &FleetArgs) -> Result<Vec<(String, String)>> {
    let mut values =
        vec![("TIME".to_owned(), format!("{}ms", args.time.as_millis())), ("SIZE".to_owned(), args.size.clone())];
    for text in &args.set {
        let Some((name, value)) = text.split_once('=').filter(|(name, _)| !name.is_empty()) else {
            return Err(BenchError::Usage(format!("--set '{text}': give NAME=VALUE")));
        };
        values.push((name.to_owned(), value.to_owned()));
    }
    Ok(values)
}

/// All combinations of clients, processes and depths.
fn matrix_points(args: &FleetArgs, hosts: usize) -> Result<Vec<FleetPoint>> {
    let all = if args.clients.is_empty() { vec![hosts] } else { args.clients.clone() };
    if let Some(wrong) = all.iter().find(|n| **n == 0 || **n > hosts) {
        return Err(BenchError::Usage(format!("--clients {wrong}: --hosts names {hosts}")));
    }
    if args.jobs.contains(&0) || args.depth.contains(&0) {
        return Err(BenchError::Usage("--jobs and --depth begin at 1".to_owned()));
    }
    let mut points = Vec::new();
    for &clients in &all {
        for &jobs in &args.jobs {
            points.extend(args.depth.iter().map(|&depth| FleetPoint { clients, jobs, depth }));
        }
    }
    Ok(points)
}

impl FleetBench<'_> {
    fn job_text(&self, variant: &FleetVariant, point: FleetPoint) -> Result<String> {
        let mut values = vec![
            ("DIR".to_owned(), variant.dir.clone()),
            ("JOBS".to_owned(), point.jobs.to_string()),
            ("DEPTH".to_owned(), point.depth.to_string()),
        ];
        values.extend(self.values.iter().cloned());
        job_file::fill_job(&self.job, &values)
    }

    /// The cases of all exports, the exports beside each other.
    fn nfs_variants(&self) -> Result<Vec<FleetVariant>> {
        let exports = self.args.nfs.iter().map(|text| NfsExport::parse(text)).collect::<Result<Vec<_>>>()?;
        if exports.is_empty() {
            return Ok(Vec::new());
        }
        if !self.args.ssh && !self.hosts.iter().all(AgentHost::is_here) {
            return Err(BenchError::Usage(
                "--nfs mounts on the hosts: give --ssh, or --hosts localhost for this machine".to_owned(),
            ));
        }
        let cases = NfsCase::parse_all(&self.args.nfs_case)?;
        let dir = self.work.scratch.path().join("nfs").join("nfs0").display().to_string();
        Ok(cases
            .iter()
            .flat_map(|case| {
                exports
                    .iter()
                    .map(|export| FleetVariant {
                        name: format!("{} {}", export.name, case.name),
                        dir: dir.clone(),
                        nfs: Some(NfsVariant { case: *case, export: export.clone(), nconnect: self.args.nconnect }),
                    })
                    .collect::<Vec<_>>()
            })
            .collect())
    }

    /// Which test of perftest is the ceiling of this job.
    fn perftest(&self) -> &'static str {
        perftest_program(job_file::writes_files(&self.job))
    }

    /// Servers on all hosts: started, or found.
    fn open_agents(&self) -> Result<Vec<ServerProcess>> {
        let logs = self.work.scratch.subdir("logs")?;
        if !self.args.ssh {
            let open = |host: &AgentHost| match host.check_listens() {
                Ok(()) => Ok(None),
                Err(_) if host.is_here() => host.start_here(&logs).map(Some),
                Err(error) => Err(error),
            };
            return self.hosts.iter().filter_map(|host| open(host).transpose()).collect();
        }
        self.hosts.iter().map(|host| host.start_over_ssh(&logs)).collect()
    }

    /// All rounds of a point, the variants in turn.
    fn run_point(&self, variants: &[FleetVariant], point: FleetPoint, fabric: &mut Vec<f64>) -> Result<Vec<FleetRow>> {
        let mut rows: Vec<FleetRow> =
            variants.iter().map(|variant| FleetRow { variant: variant.clone(), point, runs: Vec::new() }).collect();
        for _ in 0..self.args.rounds {
            if let Some(nfs) = variants.iter().find_map(|variant| variant.nfs.as_ref()).filter(|_| self.args.perftest) {
                let program = self.perftest();
                let address = &nfs.export.addresses[0];
                let rate = run_perftest(program, &self.hosts[0], self.args.ssh, address, &self.work.log(program)?)?;
                anstream::eprintln!("{program}: {} GB/s", three_digits(rate / 1e9));
                fabric.push(rate);
            }
            for row in &mut rows {
                let run = self.run_variant(&row.variant, point)?;
                let rate = three_digits(run.figures.all.fio.bandwidth / 1e9);
                anstream::eprintln!("{}: {}: {rate} GB/s", row.variant.name, point.describe());
                row.runs.push(run);
            }
        }
        Ok(rows)
    }

    /// A run, with the export mounted.
    fn run_variant(&self, variant: &FleetVariant, point: FleetPoint) -> Result<FleetRun> {
        let Some(nfs) = &variant.nfs else { return self.run_once(variant, point) };
        let hosts = &self.hosts[..point.clients];
        let ssh = self.args.ssh;
        let at = self.work.scratch.path().join("nfs");
        let (mounts, dir) = NfsMounts::mount(hosts, ssh, nfs, &at)?;
        let busy = || Ok::<_, BenchError>((nfs::busy_of(hosts, ssh)?, nfs::busy_of(&self.servers, ssh)?));
        let before = busy()?;
        let mut run = self.run_once(variant, point)?;
        let after = busy()?;
        run.cost.add_cpu("machine", after.0 - before.0);
        if !self.servers.is_empty() {
            run.cost.add_cpu("server", after.1 - before.1);
        }
        run.connections = mounts.connections(&dir)?;
        Ok(run)
    }

    fn run_once(&self, variant: &FleetVariant, point: FleetPoint) -> Result<FleetRun> {
        // Logs of servers arrive in the working directory.
        let dir = self.work.scratch.empty_subdir("run")?;
        let job = dir.join("job.fio");
        std::fs::write(&job, self.job_text(variant, point)?).map_err(|e| BenchError::io(job.display(), &e))?;
        let hosts = &self.hosts[..point.clients];
        let before = self.read_counters(variant, hosts)?;
        let reads_prepared = job_file::reads_prepared_files(&self.args.job);
        let start = || -> Result<(String, Result<FinishedChild>)> {
            let mut command = Command::new("fio");
            command.arg("--output-format=json").current_dir(&dir);
            for host in hosts {
                command.arg(host.client_word());
                // A reading job would make and extend missing files, and leave these.
                command.args(reads_prepared.then_some("--readonly")).arg("job.fio");
            }
            let done = child::run_to_exit(command, self.args.time * 3 + Duration::from_secs(120))?;
            Ok((format!("{}\n{}", done.err, done.out), done.into_success()))
        };
        let (mut printed, mut done) = start()?;
        for _ in 0..RECONNECT_ATTEMPTS {
            match &done {
                Err(BenchError::Failed(why)) if is_lost_connection(why) => {
                    std::thread::sleep(Duration::from_millis(500));
                    stop::check_stop()?;
                    (printed, done) = start()?;
                }
                _ => break,
            }
        }
        let place = variant.nfs.as_ref().map_or(variant.dir.clone(), |nfs| format!("the export {}", nfs.export.name));
        let jobs = self.args.jobs.iter().copied().max().unwrap_or(1);
        let failed = FailedJob { place, reads_prepared, size: &self.args.size, jobs };
        if reads_prepared && printed.contains(failure::NOT_MADE) {
            done = done.and(Err(BenchError::Failed("fio lacks files of its job".to_owned())));
        }
        let figures = done.and_then(|done| outcome::parse_fleet(&done.out)).map_err(|error| match error {
            BenchError::Failed(why) => failed.explain(&printed, BenchError::Failed(short_reason(&why))),
            error => error,
        })?;
        let after = self.read_counters(variant, hosts)?;
        let figures = FleetFigures { over_time: outcome::read_over_time(&dir), ..figures };
        let cost = RunCost::new("fio", figures.all.cpu, &before, &after);
        Ok(FleetRun { figures, cost, connections: BTreeMap::new() })
    }

    /// The summed counters of mounts and nodes, as far as readable.
    fn read_counters(&self, variant: &FleetVariant, hosts: &[AgentHost]) -> Result<RoleCounters> {
        let mut all = Vec::new();
        if self.args.ssh && self.args.mounts.is_empty() {
            let of = |host: &AgentHost| {
                let command = host.ssh_command(&["spurline", "stats", &variant.dir, "--json", "-c", "1"])?;
                child::run_to_end(command, Duration::from_secs(30)).and_then(|done| parse_counters(&done.out))
            };
            // A folder that is no mount of Spurline has no counters.
            let known: Vec<CounterValues> = hosts.iter().filter_map(|host| of(host).ok()).collect();
            if known.len() == hosts.len() {
                all.push(("mounts", sum_counters(&known)));
            }
        }
        for (role, pages) in [("mounts", &self.args.mounts), ("nodes", &self.args.nodes)] {
            if !pages.is_empty() {
                let known = pages
                    .iter()
                    .map(|page| query_counters(self.work.spurline()?, page, None))
                    .collect::<Result<Vec<_>>>()?;
                all.push((role, sum_counters(&known)));
            }
        }
        Ok(all)
    }
}

fn sum_counters(all: &[CounterValues]) -> CounterValues {
    let mut sum = CounterValues::new();
    for (name, n) in all.iter().flatten() {
        *sum.entry(name.clone()).or_default() += n;
    }
    sum
}

/// A server of fio that is about to end the process of the previous connection closes the next connection, without a job having
/// run.
fn is_lost_connection(why: &str) -> bool {
    why.contains(" disconnected") || why.trim_end().ends_with("exit status: 1:")
}

/// fio's lines out of a failed run, without the JSON.
fn short_reason(why: &str) -> String {
    why.split(" | {").next().unwrap_or(why).to_owned()
}

fn report(args: &FleetArgs, bench: &FleetBench<'_>, rows: &[FleetRow], fabric: &[f64]) -> Result<()> {
    let machine = bench.work.describe_machine();
    let names: Vec<&str> = bench.hosts.iter().map(|host| host.host.as_str()).collect();
    let summary = format!("{} on {}; medians of {} rounds in turn", args.job, names.join(", "), args.rounds);
    anstream::println!("{summary}");
    let perftest = (!fabric.is_empty()).then(|| (bench.perftest(), median(fabric)));
    let mut notes: Vec<String> = nfs_notes(rows);
    if !args.nfs.is_empty() {
        notes.push(machine_note(&bench.servers));
    }
    notes.extend(perftest.map(|(name, rate)| {
        format!("{name} of 1 MiB, median of {}: {} GB/s.", fabric.len(), three_digits(rate / 1e9))
    }));
    for row in rows {
        let carried = row.runs.last().map(|run| run.cost.evidence(&CARRIED_BYTES)).unwrap_or_default();
        if !carried.is_empty() {
            notes.push(format!("{} ({}): {carried}", row.variant.name, row.point.describe()));
        }
    }
    notes.push(format!("Controlled from {}", machine::one_line(&machine)));
    notes.push(bench.work.load_note());
    let result = json!({
        "job": args.job, "job_text": bench.job,
        "perftest": perftest.map(|(name, rate)| json!({ "program": name, "bytes_per_second": rate })),
        "hosts": names, "rounds": args.rounds, "rows": rows.iter().map(|row| row_json(rows, row)).collect::<Vec<_>>(),
    });
    let report = CommandReport {
        outputs: &args.report,
        command: "fio",
        about: vec![summary],
        table: result_table(rows, perftest),
        charts: charts_of(rows),
        scores: Vec::new(),
        notes,
        result,
    };
    report.finish(machine)
}

/// The row at the same point that a row is compared with: of the first folder, or of the first export in the same case.
fn first_row<'a>(rows: &'a [FleetRow], row: &FleetRow) -> Option<&'a FleetRow> {
    let mut same = rows.iter().filter(|first| first.point == row.point && nfs_case(first) == nfs_case(row));
    same.next().filter(|first| first.variant != row.variant)
}

fn nfs_case(row: &FleetRow) -> Option<NfsCase> {
    row.variant.nfs.as_ref().map(|nfs| nfs.case)
}

/// Whose processor time is counted where whole machines are.
fn machine_note(servers: &[AgentHost]) -> String {
    let names: Vec<&str> = servers.iter().map(|host| host.host.as_str()).collect();
    let server = match names[..] {
        [] => "the NFS server's is not in the report, unless it is one of them (--server-host measures it)".to_owned(),
        _ => format!("server is that of {}", names.join(", ")),
    };
    format!("Processor time: machine is that of the hosts that run the job; {server}.")
}

/// The kernel's form of each case, and the share of the time that another export costs more than the first.
fn nfs_notes(rows: &[FleetRow]) -> Vec<String> {
    let mut notes = Vec::new();
    for row in rows {
        let (Some(nfs), Some(run)) = (&row.variant.nfs, row.runs.last()) else { continue };
        let asked = nfs.case.asked(nfs.nconnect, nfs.export.addresses.len());
        let made: usize = run.connections.values().sum();
        let kinds: Vec<String> = run.connections.iter().map(|(kind, n)| format!("{n} over {kind}")).collect();
        if rows.first().is_some_and(|first| first.point == row.point) && asked > 1 {
            let less = if made < asked { "only " } else { "" };
            notes.push(format!(
                "{}: {asked} connections asked, the kernel made {less}{}.",
                row.variant.name,
                kinds.join(", ")
            ));
        }
        if let Some(first) = first_row(rows, row) {
            let share = 1.0 - row.bandwidth() / first.bandwidth().max(1e-9);
            let FleetPoint { jobs, depth, .. } = row.point;
            notes.push(format!(
                "{} ({jobs} jobs, depth {depth}): {:.0} % of each byte's time is the exported file system's, beyond {}.",
                row.variant.name,
                share.max(0.0) * 100.0,
                first.variant.name
            ));
        }
    }
    notes
}

fn result_table(rows: &[FleetRow], perftest: Option<(&str, f64)>) -> Vec<Vec<String>> {
    let heads =
        ["folder", "hosts", "jobs", "depth", "GB/s", "IOPS", "p50 µs", "p99 µs", "CPU-s/GiB fio", "mounts", "nodes"];
    let mut table = vec![heads.map(str::to_owned).to_vec()];
    // Only some runs know what whole machines did.
    let whole: Vec<&str> = FLEET_ROLES[3..]
        .iter()
        .filter(|role| rows.iter().any(|row| row.cpu_per_gib(role).is_some()))
        .copied()
        .collect();
    table[0].extend(whole.iter().chain(&["ratio"]).map(|head| (*head).to_owned()));
    table[0].extend(perftest.map(|(name, _)| format!("of {name}")));
    for row in rows {
        let latency = |pick: fn((f64, f64)) -> f64| {
            known_digits(median_known(&row.runs, |run| run.figures.all.fio.latency_us.map(pick)))
        };
        let mut line = vec![
            row.variant.name.clone(),
            row.point.clients.to_string(),
            row.point.jobs.to_string(),
            row.point.depth.to_string(),
            three_digits(row.bandwidth() / 1e9),
            three_digits(row.iops()),
            latency(|times| times.0),
            latency(|times| times.1),
        ];
        line.extend(FLEET_ROLES[..3].iter().chain(&whole).map(|role| known_digits(row.cpu_per_gib(role))));
        line.push(first_row(rows, row).map_or("-".to_owned(), |first| {
            format!("{:.2} of {}", row.bandwidth() / first.bandwidth().max(1e-9), first.variant.name)
        }));
        line.extend(perftest.map(|(_, rate)| {
            let rdma = row.variant.nfs.as_ref().is_some_and(|nfs| nfs.case.rdma);
            if rdma { format!("{:.2}", row.bandwidth() / rate.max(1e-9)) } else { "-".to_owned() }
        }));
        table.push(line);
    }
    table
}

fn charts_of(rows: &[FleetRow]) -> Vec<BenchChart> {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.variant.name.as_str()) {
            names.push(&row.variant.name);
        }
    }
    let mut charts = Vec::new();
    type PointValue = fn(&FleetPoint) -> u32;
    let axes: [(&str, PointValue); 3] =
        [("hosts", |point| point.clients as u32), ("jobs", |point| point.jobs), ("depth", |point| point.depth)];
    for (axis, of) in axes {
        // One axis, with the others at the greatest value.
        let series: Vec<ChartSeries> = names
            .iter()
            .map(|name| ChartSeries {
                name: (*name).to_owned(),
                points: rows
                    .iter()
                    .filter(|row| {
                        axes.iter()
                            .filter(|(other, _)| *other != axis)
                            .all(|(_, of)| of(&row.point) == rows.iter().map(|row| of(&row.point)).max().unwrap_or(0))
                    })
                    .filter(|row| row.variant.name == **name)
                    .map(|row| (f64::from(of(&row.point)), row.bandwidth() / 1e9))
                    .collect(),
            })
            .collect();
        if series.iter().any(|series| series.points.len() > 1) {
            charts.push(BenchChart::lines(format!("Throughput over {axis}"), axis, "GB/s", series));
        }
    }
    let Some(last) = rows.last().map(|row| row.point) else { return charts };
    let at_last = || rows.iter().filter(|row| row.point == last);
    let beside = at_last().map(|row| (row.variant.name.clone(), row.bandwidth() / 1e9));
    charts.push(BenchChart::bars("Folders beside each other", "GB/s", beside));
    let over_time = at_last()
        .filter_map(|row| Some(ChartSeries::rates(row.variant.name.clone(), &row.runs.last()?.figures.over_time)));
    charts.push(BenchChart::lines("Throughput over time", "seconds", "GB/s", over_time.collect()));
    let cpu = at_last().flat_map(|row| {
        FLEET_ROLES
            .into_iter()
            .filter_map(move |role| Some((format!("{}: {role}", row.variant.name), row.cpu_per_gib(role)?)))
    });
    charts.push(BenchChart::bars("Processor time", "CPU-s/GiB", cpu));
    charts
}

fn row_json(rows: &[FleetRow], row: &FleetRow) -> Value {
    let cpu: serde_json::Map<String, Value> =
        FLEET_ROLES.iter().filter_map(|role| Some(((*role).to_owned(), row.cpu_per_gib(role)?.into()))).collect();
    json!({
        "folder": row.variant.name, "dir": row.variant.dir, "hosts": row.point.clients, "jobs": row.point.jobs,
        "depth": row.point.depth, "bytes_per_second": row.bandwidth(), "nfs_case": row.variant.nfs.as_ref().map(|nfs| nfs.case.name),
        "ratio": first_row(rows, row).map(|first| row.bandwidth() / first.bandwidth().max(1e-9)),
        "iops": row.iops(), "cpu_seconds_per_gib": cpu,
        "runs": row.runs.iter().map(run_json).collect::<Vec<_>>(),
    })
}

fn host_json(figures: &outcome::HostFigures) -> Value {
    let fio = figures.fio;
    json!({
        "host": figures.host, "bytes_per_second": fio.bandwidth, "iops": fio.iops, "bytes": fio.bytes,
        "cpu_seconds": figures.cpu, "p50_us": fio.latency_us.map(|t| t.0), "p99_us": fio.latency_us.map(|t| t.1),
    })
}

fn run_json(run: &FleetRun) -> Value {
    json!({
        "all": host_json(&run.figures.all), "hosts": run.figures.hosts.iter().map(host_json).collect::<Vec<_>>(),
        "cpu": run.cost.cpu_json(run.figures.all.fio.bytes), "counters": run.cost.grown, "connections": run.connections,
        "over_time": rates_json(&run.figures.over_time),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fio::FioFigures;

    fn row(name: &str, clients: usize, bandwidth: f64) -> FleetRow {
        let fio = FioFigures { bandwidth, bytes: 1 << 30, ..FioFigures::default() };
        let all = outcome::HostFigures { fio, cpu: 0.2, ..Default::default() };
        let figures = FleetFigures { all, over_time: vec![(0.5, bandwidth), (1.0, bandwidth)], ..Default::default() };
        let grown = [(format!("mounts.{name}.recv_bytes"), 5_000_000)].into();
        let cost = RunCost { cpu: vec![("fio", 0.2), ("mounts", 0.4)], grown };
        let runs = vec![FleetRun { figures, cost, connections: BTreeMap::new() }];
        let variant = FleetVariant { name: name.into(), dir: format!("/mnt/{name}"), nfs: None };
        FleetRow { variant, point: FleetPoint { clients, jobs: 1, depth: 1 }, runs }
    }

    #[test]
    fn folders_have_names() {
        let variant = |text| parse_variant(text).map(|variant| (variant.name, variant.dir));
        assert_eq!(variant("tcp=/mnt/a").unwrap(), ("tcp".into(), "/mnt/a".into()));
        assert_eq!(variant("/mnt/a=b").unwrap(), ("/mnt/a=b".into(), "/mnt/a=b".into()));
        assert!(variant("mnt").is_err() && variant("=/mnt").is_err());
    }

    #[test]
    fn rows_stand_beside_each_other() {
        let rows = [row("tcp", 1, 1e9), row("rdma", 1, 2e9), row("tcp", 2, 1.5e9), row("rdma", 2, 3e9)];
        let table = result_table(&rows, None);
        assert_eq!((table.len(), table[4].last().unwrap().as_str()), (5, "2.00 of tcp"));
        assert_eq!(table[1][8..11], ["0.200", "0.400", "-"].map(str::to_owned));
        let charts = charts_of(&rows);
        let titles: Vec<&str> = charts.iter().map(|chart| chart.title.as_str()).collect();
        assert_eq!(
            titles,
            ["Throughput over hosts", "Folders beside each other", "Throughput over time", "Processor time"]
        );
        assert_eq!(charts[0].series[1].points, [(1.0, 2.0), (2.0, 3.0)]);
        assert_eq!(rows[1].runs[0].cost.evidence(&CARRIED_BYTES), "5 MB over rdma");
        assert_eq!(row_json(&rows, &rows[0])["cpu_seconds_per_gib"], json!({ "fio": 0.2, "mounts": 0.4 }));
    }

    #[test]
    fn lost_connections_are_told_from_failed_jobs() {
        assert!(is_lost_connection("fio --client=h: exit status: 1: client: host=h disconnected"));
        assert!(is_lost_connection("fio --client=h: exit status: 1: "));
        assert!(!is_lost_connection("fio --client=h: exit status: 1: <h> fio: pid=1, err=2/file:filesetup.c"));
    }

    #[test]
    fn exports_are_compared_case_by_case() {
        let nfs = |export: &str, case: &str, bandwidth, made| {
            let mut row = row("tcp", 1, bandwidth);
            let case = NfsCase::parse_all(&[case.to_owned()]).unwrap()[0];
            let export = NfsExport::parse(&format!("{export}=10.0.0.1:/x")).unwrap();
            row.variant.name = format!("{} {}", export.name, case.name);
            row.variant.nfs = Some(NfsVariant { case, export, nconnect: 4 });
            row.runs[0].connections = [(if case.rdma { "rdma" } else { "tcp" }.to_owned(), made)].into();
            row.runs[0].cost.add_cpu("machine", 1.5);
            row
        };
        let rows = [
            row("local", 1, 5e9),
            nfs("tmpfs", "v3-tcp", 2e9, 1),
            nfs("mount", "v3-tcp", 1.5e9, 1),
            nfs("tmpfs", "v4-rdma-nconnect", 3e9, 1),
            nfs("mount", "v4-rdma-nconnect", 2.4e9, 1),
        ];
        let table = result_table(&rows, Some(("ib_write_bw", 6e9)));
        assert_eq!(table[0][11..], ["machine", "ratio", "of ib_write_bw"].map(str::to_owned));
        assert_eq!(table[1][11..], ["-", "-", "-"].map(str::to_owned));
        assert_eq!(table[2][11..], ["1.50", "-", "-"].map(str::to_owned));
        assert_eq!(table[3][12..], ["0.75 of tmpfs v3-tcp", "-"].map(str::to_owned));
        assert_eq!(table[5][12..], ["0.80 of tmpfs v4-rdma-nconnect", "0.40"].map(str::to_owned));
        let mut measured = rows.map(|mut row| {
            row.runs[0].cost.add_cpu("server", 2.5);
            row
        });
        measured[1].runs[0].cost.cpu.pop();
        let table = result_table(&measured, None);
        assert_eq!(table[0][11..], ["machine", "server", "ratio"].map(str::to_owned));
        assert_eq!((table[2][12].as_str(), table[3][12].as_str()), ("-", "2.50"));
        assert_eq!(row_json(&measured, &measured[2])["cpu_seconds_per_gib"]["server"], 2.5);
        assert!(machine_note(&[]).contains("--server-host"));
        assert!(machine_note(&[AgentHost::parse("nas1").unwrap()]).contains("server is that of nas1"));
        let rows = measured;
        let notes = nfs_notes(&rows).join("\n");
        assert!(notes.contains("mount v3-tcp (1 jobs, depth 1): 25 % of each byte's time"), "{notes}");
        assert!(
            notes.contains("mount v4-rdma-nconnect: 4 connections asked, the kernel made only 1 over rdma."),
            "{notes}"
        );
        assert_eq!(
            (&row_json(&rows, &rows[4])["nfs_case"], &row_json(&rows, &rows[4])["ratio"]),
            (&"v4-rdma-nconnect".into(), &0.8.into())
        );
    }
}
