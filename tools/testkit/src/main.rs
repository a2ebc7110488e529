//! The embedded S3 server and the fault-injecting proxy for shell tests: a line prints the address, lines on the standard input
//! control the proxy, and the end of the input ends the program.

#![forbid(unsafe_code)]

use spurline_testkit::{ACCESS_KEY, ChaosProxy, ProxyFault, S3Server, SECRET_KEY};
use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

const TESTKIT_USAGE: &str = "\
spurline-testkit s3-server DIR                      S3 over a directory of buckets
spurline-testkit s3-memory BUCKET IP:PORT           S3 in memory with one bucket
spurline-testkit proxy HOST:PORT                    a proxy; commands on standard input, each with one line of output:
    slow-down|close|stall|html|cut-half N    do this to the next N requests
    cut-after|stall-after BYTES N            let BYTES of an answer's body pass
    delay MS N, latency MS                   delay the next N, or all
    refuse, calm, forget, count METHOD PATH  (METHOD * for any)
Both servers print `listening URL` and `key ID SECRET`, and end with their standard input.";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}\n{TESTKIT_USAGE}");
            ExitCode::from(2)
        }
    }
}

fn run(words: &[&str]) -> Result<(), String> {
    match words {
        ["s3-server", dir] => {
            serve(&S3Server::start(Path::new(dir)).map_err(start_error)?);
            Ok(())
        }
        ["s3-memory", bucket, at] => {
            let at = at.parse().map_err(|_| format!("'{at}' is not an IP:PORT"))?;
            let server = S3Server::in_memory_on(at).map_err(start_error)?;
            server.create_bucket(bucket);
            serve(&server);
            Ok(())
        }
        ["proxy", target] => {
            let target = target.parse().map_err(|_| format!("'{target}' is not a HOST:PORT"))?;
            let proxy = ChaosProxy::start(target).map_err(start_error)?;
            print_line(&format!("listening {}", proxy.endpoint()));
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                let answer = run_command(&proxy, &line.split_whitespace().collect::<Vec<_>>());
                print_line(&answer.unwrap_or_else(|| format!("error: '{line}' is not a command")));
            }
            Ok(())
        }
        _ => Err("usage error".into()),
    }
}

/// Serves until the end of the standard input.
fn serve(server: &S3Server) {
    print_line(&format!("listening {}\nkey {ACCESS_KEY} {SECRET_KEY}", server.endpoint()));
    for _ in std::io::stdin().lines() {}
}

fn start_error(e: std::io::Error) -> String {
    format!("can't start: {e}")
}

fn print_line(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

fn run_command(proxy: &ChaosProxy, words: &[&str]) -> Option<String> {
    match words {
        ["refuse"] => proxy.refuse_connections(true),
        ["calm"] => proxy.clear_faults(),
        ["forget"] => proxy.forget_requests(),
        ["latency", ms] => proxy.set_latency(Duration::from_millis(ms.parse().ok()?)),
        ["count", method, path] => {
            return Some(proxy.count_requests(if *method == "*" { "" } else { method }, path).to_string());
        }
        [fault, arguments @ .., times] => {
            let number = || arguments.first().and_then(|a| a.parse::<u64>().ok());
            let fault = match *fault {
                "slow-down" => ProxyFault::SlowDown,
                "close" => ProxyFault::Close,
                "stall" => ProxyFault::Stall,
                "html" => ProxyFault::Html,
                "cut-half" => ProxyFault::CutHalf,
                "cut-after" => ProxyFault::CutAfter(number()?),
                "stall-after" => ProxyFault::StallAfter(number()?),
                "delay" => ProxyFault::Delay(Duration::from_millis(number()?)),
                _ => return None,
            };
            proxy.inject(fault, times.parse().ok()?);
        }
        _ => return None,
    }
    Some("ok".into())
}
