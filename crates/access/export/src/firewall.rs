//! Whether this host filters packets of NFS clients: ufw, firewalld, and rules of nftables and iptables. Judges no rule: any
//! filter may filter these.

use crate::requirements::{RequirementOutcome, RequirementState, outcome};
use std::path::Path;
use std::process::{Command, Stdio};

/// Checks the firewalls of this host.
pub(crate) fn check_firewall(rdma: bool) -> RequirementOutcome {
    let ufw =
        std::fs::read_to_string("/etc/ufw/ufw.conf").is_ok_and(|text| text.lines().any(|l| l.trim() == "ENABLED=yes"));
    let more = if rdma { "; RDMA passes a host's firewall by, but switches may filter it" } else { "" };
    let limited = |evidence: &str, remedy: &str| {
        outcome("firewall", RequirementState::Limited, evidence, format!("allow the clients: {remedy}{more}"))
    };
    if ufw {
        return limited("ufw is active", "ufw allow from CLIENTS to any port 2049,111,20048 proto tcp");
    }
    if Path::new("/run/firewalld").is_dir() {
        return limited("firewalld is active", "firewall-cmd --add-service={nfs,rpc-bind,mountd}");
    }
    let rules = output_of("nft", &["list", "ruleset"]);
    if let Some(chain) = filtering_chain(&rules) {
        return limited(
            &format!("{chain} of nftables may drop packets"),
            "TCP port 2049, and 111 and 20048 for NFSv3, if its rules do not",
        );
    }
    // Tables of the older iptables, which nft does not show.
    for (names, program) in
        [("/proc/net/ip_tables_names", "iptables-legacy"), ("/proc/net/ip6_tables_names", "ip6tables-legacy")]
    {
        let used = std::fs::read_to_string(names).is_ok_and(|text| text.lines().any(|line| line == "filter"));
        if used && drops_input(&output_of(program, &["-S", "INPUT"])) {
            return limited(
                &format!("the chain INPUT of {program} may drop packets"),
                "TCP port 2049, and 111 and 20048 for NFSv3, if its rules do not",
            );
        }
    }
    outcome("firewall", RequirementState::Met, "no ufw, no firewalld, and no rule that drops packets for this host", "")
}

/// The output of a program; nothing if the program is not installed or fails.
fn output_of(program: &str, words: &[&str]) -> String {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&folders).chain(["/usr/sbin".into(), "/sbin".into()]);
    let Some(file) = folders.map(|folder| folder.join(program)).find(|file| file.is_file()) else {
        return String::new();
    };
    let out = Command::new(file).args(words).stdin(Stdio::null()).stderr(Stdio::null()).output();
    out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned()).unwrap_or_default()
}

/// The first chain at the hook of incoming packets that drops packets, or sends packets to a chain that may.
fn filtering_chain(rules: &str) -> Option<String> {
    let mut table = "";
    let mut chain = "";
    let mut incoming = false;
    for line in rules.lines().map(str::trim) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["table", _, name, "{"] => table = name,
            ["chain", name, "{"] => {
                chain = name;
                incoming = false;
            }
            ["type", "filter", "hook", "input", ..] => {
                incoming = true;
                if line.contains("policy drop") {
                    return Some(format!("chain {chain} in table {table}"));
                }
            }
            _ if incoming && words.iter().any(|word| ["drop", "reject", "jump", "goto"].contains(word)) => {
                return Some(format!("chain {chain} in table {table}"));
            }
            _ => {}
        }
    }
    None
}

/// Whether the chain of incoming packets of iptables drops packets, or sends packets to a chain that may.
fn drops_input(rules: &str) -> bool {
    rules.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["-P", _, policy] => policy == "DROP",
            _ => words
                .windows(2)
                .any(|pair| matches!(pair, ["-j" | "-g", target] if !["ACCEPT", "LOG"].contains(target))),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_of_incoming_packets_that_drops_some_is_named() {
        // As nft 1.0.6 shows the rules of Linux 6.1.
        let policy = "table inet f {
\tchain input {
\t\ttype filter hook input priority filter; policy drop;
\t\ttcp dport 22 accept
\t}
}
";
        assert_eq!(filtering_chain(policy).unwrap(), "chain input in table f");
        let rule = "table ip filter {
\tchain INPUT {
\t\ttype filter hook input priority filter; policy accept;
\t\ttcp dport 1 counter packets 0 bytes 0 drop
\t}
}
";
        assert_eq!(filtering_chain(rule).unwrap(), "chain INPUT in table filter");
        assert_eq!(filtering_chain(&rule.replace("hook input", "hook forward")), None);
        assert_eq!(filtering_chain(&policy.replace("policy drop", "policy accept")), None);
        assert_eq!(filtering_chain(""), None);
    }

    #[test]
    fn rules_of_the_older_iptables() {
        // As iptables-legacy 1.8.9 shows the rules of Linux 6.1.
        assert!(drops_input("-P INPUT ACCEPT\n-A INPUT -p tcp -m tcp --dport 1 -j DROP\n"));
        assert!(drops_input("-P INPUT DROP\n"));
        assert!(!drops_input("-P INPUT ACCEPT\n-A INPUT -p tcp -m tcp --dport 1 -j ACCEPT\n"));
    }
}
