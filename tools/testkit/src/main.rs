//! The embedded S3 server and the misbehaving proxy for shell tests: one line says where it listens, lines on the
//! standard input command the proxy, and its end ends the program.

#![forbid(unsafe_code)]

use spurline_testkit::{ACCESS_KEY, ChaosProxy, Fault, S3Server, SECRET_KEY};
use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "\
spurline-testkit s3-server DIR [--listen IP:PORT]   S3 over a directory whose folders are buckets
spurline-testkit s3-memory BUCKET [--listen IP:PORT] S3 in memory with one bucket
spurline-testkit proxy HOST:PORT                    a proxy; commands on standard input, each answered by a line:
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
            eprintln!("{message}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn run(words: &[&str]) -> Result<(), String> {
    let (what, of, at) = match words {
        [what, of] => (*what, *of, "127.0.0.1:0"),
        [what @ ("s3-server" | "s3-memory"), of, "--listen", at] => (*what, *of, *at),
        _ => return Err("the words were wrong".into()),
    };
    let at = at.parse().map_err(|_| format!("'{at}' is no IP:PORT"))?;
    let failed = |e: std::io::Error| format!("it can't start: {e}");
    match what {
        "s3-server" | "s3-memory" => {
            let server = if what == "s3-server" {
                S3Server::start_on(Path::new(of), at).map_err(failed)?
            } else {
                let server = S3Server::in_memory_on(at).map_err(failed)?;
                server.create_bucket(of);
                server
            };
            say(&format!("listening {}\nkey {ACCESS_KEY} {SECRET_KEY}", server.endpoint()));
            for _ in std::io::stdin().lines() {}
            Ok(())
        }
        "proxy" => {
            let target = of.parse().map_err(|_| format!("'{of}' is no HOST:PORT"))?;
            let proxy = ChaosProxy::start(target).map_err(failed)?;
            say(&format!("listening {}", proxy.endpoint()));
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                let answer = command(&proxy, &line.split_whitespace().collect::<Vec<_>>());
                say(&answer.unwrap_or_else(|| format!("error: '{line}' is no command")));
            }
            Ok(())
        }
        other => Err(format!("'{other}' is no command")),
    }
}

fn say(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

fn command(proxy: &ChaosProxy, words: &[&str]) -> Option<String> {
    match words {
        ["refuse"] => proxy.refuse(true),
        ["calm"] => proxy.calm(),
        ["forget"] => proxy.forget(),
        ["latency", ms] => proxy.set_latency(Duration::from_millis(ms.parse().ok()?)),
        ["count", method, path] => {
            return Some(proxy.count(if *method == "*" { "" } else { method }, path).to_string());
        }
        [fault, arguments @ .., times] => {
            let number = || arguments.first().and_then(|a| a.parse::<u64>().ok());
            let fault = match *fault {
                "slow-down" => Fault::SlowDown,
                "close" => Fault::Close,
                "stall" => Fault::Stall,
                "html" => Fault::Html,
                "cut-half" => Fault::CutHalf,
                "cut-after" => Fault::CutAfter(number()?),
                "stall-after" => Fault::StallAfter(number()?),
                "delay" => Fault::Delay(Duration::from_millis(number()?)),
                _ => return None,
            };
            proxy.inject(fault, times.parse().ok()?);
        }
        _ => return None,
    }
    Some("ok".into())
}
