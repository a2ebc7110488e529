//! `spurline load` and `spurline free`: start, watch and stop jobs, which a mount or a coordinator runs.

pub mod show;
mod watch;

use crate::cli::{FreeArgs, JobArgs, LoadArgs};
use crate::{rules, signals};
use spurline_config::Fault;
use spurline_jobs::{JobAction, JobRequest, JobSpec};
use spurline_runtime::jobs::worker::JobWorker;
use spurline_runtime::{group, setup};
use std::io::Read as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use watch::JobWatch;

/// Runs `spurline load`.
///
/// # Errors
/// When the paths are in no mount, or the process there refuses the job or does not answer.
pub fn load_files(args: LoadArgs) -> Result<ExitCode, Fault> {
    run_job(JobAction::Load, &args.path, &args.job, args.pin, |spec| JobSpec {
        rate: args.rate.map_or(0, |rate| rate.0),
        metadata_only: args.metadata_only,
        verify: args.verify,
        skip_if_exists: args.skip_if_exists,
        replicas: args.replicas,
        ..spec
    })
}

/// Runs `spurline free`.
///
/// # Errors
/// As [`load_files`].
pub fn free_files(args: FreeArgs) -> Result<ExitCode, Fault> {
    run_job(JobAction::Free, &args.path, &args.job, false, |spec| JobSpec {
        with_pinned: args.pinned,
        everything: args.all,
        ..spec
    })
}

fn run_job(
    action: JobAction,
    paths: &[String],
    args: &JobArgs,
    pin: bool,
    more: impl FnOnce(JobSpec) -> JobSpec,
) -> Result<ExitCode, Fault> {
    let listed = args.files_from.as_deref().map(listed_paths).transpose()?;
    let whole_source = args.source.as_ref().map(ToString::to_string);
    let paths = match &listed {
        Some(listed) => listed,
        None if paths.is_empty() => whole_source.as_slice(),
        None => paths,
    };
    if paths.is_empty() {
        return Err(Fault::usage(
            format!("nothing to {action}"),
            format!(
                "name files or folders: spurline {action} PATH, a list of them with --files-from FILE, or all of a source with \
                 --source URL"
            ),
        ));
    }
    let (place, below) = find_worker(action, paths, args)?;
    let spec = more(JobSpec {
        action,
        source: place.source().to_owned(),
        paths: below,
        listed: listed.is_some(),
        include: args.include.clone(),
        exclude: args.exclude.clone(),
        metadata_only: false,
        verify: false,
        skip_if_exists: false,
        replicas: None,
        rate: 0,
        with_pinned: false,
        everything: false,
        parallel: args.parallel,
    });
    if spec.everything && !spec.covers_source() {
        return Err(Fault::usage(
            format!("--all empties the whole cache, and {} is a part of its source", paths.join(", ")),
            "name the mountpoint, or leave --all out to free these paths",
        ));
    }
    spec.file_filter()
        .map_err(|why| Fault::usage(why, "* is any part of a name, ** any folders, [ab] one of these"))?;
    let mut look = JobWatch::new(&place, args.json, watch::job_words(action, paths, args, &place));
    if args.progress || args.stop {
        // Without options, any job on these paths is meant.
        let id = if spec.is_plain() { spec.subject() } else { spec.id() };
        let request = if args.stop { JobRequest::Stop { id } } else { JobRequest::Progress { id } };
        let now = place.send_request(&request, 0).map_err(|error| place.fault_of(&error))?;
        if args.stop {
            return look.print_end(&now);
        }
        if args.json || !show::is_terminal() {
            look.print_others(&now);
            return Ok(show::print_report(&now, args.json));
        }
        return look.watch_job(&now, &*signals::stop_flag(1)?, false);
    }
    if pin && let Some(registry) = &args.registry {
        let trust = args.trust.check(false)?;
        rules::pin_before_load(registry, &args.cache_group, &trust, place.source(), &spec.paths, args.json)?;
    }
    // Installed before the job starts: a signal in between must not leave the job running.
    let interrupted = if args.submit { Arc::default() } else { signals::stop_flag(1)? };
    let submit = JobRequest::Submit { spec: Box::new(spec.clone()) };
    let begun = place.send_request(&submit, 0).map_err(|error| place.fault_of(&error))?;
    let joined = begun.joined == Some(true);
    if args.submit {
        if args.json {
            show::print_json(&begun);
        } else {
            anstream::println!(
                "{} is under way{}, done by {}; --progress in the place of --submit shows how far it is",
                spec.id(),
                if joined { " since before" } else { "" },
                place.who()
            );
        }
        return Ok(ExitCode::SUCCESS);
    }
    if joined && !args.json {
        anstream::eprintln!("{} was under way already; Ctrl-C ends this look at it, --stop ends the job", spec.id());
    }
    look.watch_job(&begun, &interrupted, !joined)
}

/// The worker of a job on `paths`, and the paths below the source.
fn find_worker(action: JobAction, paths: &[String], args: &JobArgs) -> Result<(JobWorker, Vec<String>), Fault> {
    let url = paths.iter().find(|path| path.contains("://"));
    match (&args.registry, &args.source, url) {
        (Some(registry), Some(source), _) => {
            let trust = setup::open_trust(&args.trust.check(false)?, &group::hostname())?;
            JobWorker::of_group(registry, &args.cache_group, source, trust, paths)
        }
        (Some(registry), None, _) if args.said.registry || args.said.cache_group || url.is_some() => Err(Fault::usage(
            format!("the source of these files is missing: {registry} does not know it"),
            "give --source URL, the same that the mounts of the group mount",
        )),
        (None, Some(source), _) => Err(Fault::usage(
            format!("--source {source} is of a group, and no registry is named"),
            "give --registry coordinator://HOST:PORT, or set SPURLINE_REGISTRY",
        )),
        (None, None, _) if args.said.cache_group => Err(Fault::usage(
            format!("--cache-group {} is known to a registry, and none is named", args.cache_group),
            "give --registry coordinator://HOST:PORT, or set SPURLINE_REGISTRY; and --source URL",
        )),
        (None, None, Some(url)) => Err(Fault::usage(
            format!("{url} is a URL, and no coordinator is named that would {action} it"),
            "give --registry coordinator://HOST:PORT, or set SPURLINE_REGISTRY, and --source URL; or name a path in a \
             mount of this machine, whose process does it",
        )),
        _ => JobWorker::of_paths(paths),
    }
}

/// The paths of a list, a path in each line; `-` is standard input.
///
/// # Errors
/// When the list can't be read, or is empty.
fn listed_paths(file: &Path) -> Result<Vec<String>, Fault> {
    let mut text = String::new();
    let read = if file == Path::new("-") {
        std::io::stdin().read_to_string(&mut text)
    } else {
        std::fs::File::open(file).and_then(|mut file| file.read_to_string(&mut text))
    };
    read.map_err(|e| {
        let what = format!("--files-from {}: {e}", file.display());
        if e.kind() == std::io::ErrorKind::InvalidData {
            Fault::usage(what, "a list has one path a line, in UTF-8")
        } else {
            Fault::missing(what, "name a readable file, or - for standard input")
        }
    })?;
    let paths: Vec<String> = text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if paths.is_empty() {
        return Err(Fault::usage(format!("--files-from {}: no path is in it", file.display()), "one path a line"));
    }
    Ok(paths)
}
