//! `spurline stats`: polls the counters of a mount or a node and prints the differences.

mod render;

pub use render::columns_help;

use crate::cli::StatsArgs;
use render::{StatsTable, own_sections};
use spurline_config::Fault;
use spurline_runtime::locator::{PROCESS_ANSWER_LIMIT, resolve_target};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Lines between two headers.
const HEADER_EVERY: u64 = 20;

/// Runs the command.
///
/// # Errors
/// When an argument is wrong, or the target is missing or stops answering.
pub fn run(args: StatsArgs) -> Result<(), Fault> {
    let chosen = args.schema.as_deref().map(StatsTable::new).transpose()?;
    if args.interval < Duration::from_millis(10) {
        return Err(Fault::usage("--interval below 10ms would measure itself", "give 1 (second) or more"));
    }
    if args.count == Some(0) {
        return Err(Fault::usage(
            "--count 0 would show nothing",
            "give 1 or more, or leave it out to go on until Ctrl-C",
        ));
    }
    let peer = resolve_target(&args.target)?;
    let mut out = anstream::stdout();
    let colour = std::io::stdout().is_terminal();
    let lines = args.count.unwrap_or(u64::MAX);
    if args.json {
        for line in 0..lines {
            if line > 0 {
                std::thread::sleep(args.interval);
            }
            if !print_line(&mut out, &peer.fetch_stats_json(PROCESS_ANSWER_LIMIT)?.to_string())? {
                return Ok(());
            }
        }
        return Ok(());
    }
    let mut before = peer.fetch_stats(PROCESS_ANSWER_LIMIT)?;
    let mut at = Instant::now();
    let own = match chosen {
        Some(_) => "",
        None => own_sections(&peer.fetch_status(PROCESS_ANSWER_LIMIT)?),
    };
    let mut table = chosen.unwrap_or_else(|| StatsTable::with_figures(own, &before));
    let by_figures = !own.is_empty();
    let mut until_header = 0;
    let mut left_out = String::new();
    for _ in 0..lines {
        if until_header == 0 {
            if by_figures && let Some(width) = terminal_width() {
                let more = table.fit_into(width);
                if more != left_out && !more.is_empty() {
                    anstream::eprintln!("not shown in {width} columns: {more}; --schema chooses");
                }
                left_out = more;
            }
            let [titles, heads] = table.header_lines(colour);
            if !print_line(&mut out, &titles)? || !print_line(&mut out, &heads)? {
                return Ok(());
            }
            until_header = HEADER_EVERY;
        }
        std::thread::sleep(args.interval);
        let now = peer.fetch_stats(PROCESS_ANSWER_LIMIT)?;
        let seconds = at.elapsed().as_secs_f64();
        at = Instant::now();
        if !print_line(&mut out, &table.table_line(&before, &now, seconds, colour))? {
            return Ok(());
        }
        until_header -= 1;
        if by_figures {
            let next = StatsTable::with_figures(own, &now);
            if next.letters() != StatsTable::with_figures(own, &before).letters() {
                until_header = 0;
            }
            if until_header == 0 {
                table = next;
            }
        }
        before = now;
    }
    Ok(())
}

/// The columns of the terminal on standard output; `None` for a file or a pipe.
fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    (size.ws_col > 0).then_some(size.ws_col.into())
}

/// Prints a line; `false` when the reader has closed the pipe (`| head`).
fn print_line(out: &mut impl Write, line: &str) -> Result<bool, Fault> {
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Fault::failed(format!("standard output: {e}"), "")),
    }
}
