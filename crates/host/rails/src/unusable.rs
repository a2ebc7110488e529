//! Each way in which an interface can't be a rail, in words, with what to do about it.

/// Why an interface named with --rdma-network can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// There is no such interface.
    #[error("--rdma-network {interface}: there is no interface of that name here")]
    NotThere {
        /// The interface.
        interface: String,
        /// Interfaces that have an RDMA device.
        others: Vec<String>,
    },
    /// No RDMA device has it.
    #[error("--rdma-network {interface}: no RDMA device belongs to it ({devices})")]
    NoDevice {
        /// The interface.
        interface: String,
        /// What devices there are, in words.
        devices: String,
        /// Interfaces that have an RDMA device.
        others: Vec<String>,
    },
    /// Its port carries nothing.
    #[error(
        "--rdma-network {interface}: port {port} of {device} is not active: its state is '{state}', its link '{phys}'"
    )]
    PortDown {
        /// The interface.
        interface: String,
        /// Its device.
        device: String,
        /// Its port.
        port: u32,
        /// What the port's `state` says.
        state: String,
        /// What the port's `phys_state` says.
        phys: String,
        /// Whether a subnet manager has to configure it.
        infiniband: bool,
    },
    /// It has no address that others can reach.
    #[error("--rdma-network {interface}: it has no address that other machines can reach{found}")]
    NoAddress {
        /// The interface.
        interface: String,
        /// The addresses it has, in words.
        found: String,
    },
    /// No GID of the device stands for its address.
    #[error("--rdma-network {interface}: port {port} of {device} has no GID for {address}; it has {gids}")]
    NoGid {
        /// The interface.
        interface: String,
        /// Its device.
        device: String,
        /// Its port.
        port: u32,
        /// Its address.
        address: String,
        /// What GIDs there are.
        gids: String,
    },
    /// Memory that RDMA registers may not be locked.
    #[error("--rdma-network {interface}: {needed} of memory have to be locked for RDMA, the limit is {limit}")]
    Memlock {
        /// The interface.
        interface: String,
        /// The limit.
        limit: String,
        /// How much is needed.
        needed: String,
        /// The same in the unit of `ulimit -l`.
        kib: u64,
    },
}

impl Unusable {
    /// The interface it is about.
    pub fn interface(&self) -> &str {
        match self {
            Unusable::NotThere { interface, .. }
            | Unusable::NoDevice { interface, .. }
            | Unusable::PortDown { interface, .. }
            | Unusable::NoAddress { interface, .. }
            | Unusable::NoGid { interface, .. }
            | Unusable::Memlock { interface, .. } => interface,
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> String {
        let instead = |others: &[String]| match others {
            [] => "no interface here has one: install the NIC's driver, or try without hardware: 'modprobe rdma_rxe; \
                   rdma link add rxe0 type rxe netdev IF'; or leave --rdma-network out for TCP"
                .to_owned(),
            some => format!("interfaces with an RDMA device are {}", some.join(", ")),
        };
        match self {
            Unusable::NotThere { others, .. } | Unusable::NoDevice { others, .. } => instead(others),
            Unusable::PortDown { interface, infiniband: true, .. } => {
                format!("check the cable and that a subnet manager runs (sminfo), then 'ip link set {interface} up'")
            }
            Unusable::PortDown { interface, .. } => {
                format!("check the cable and the switch port, then 'ip link set {interface} up'")
            }
            Unusable::NoAddress { interface, .. } => {
                format!("give it one: 'ip address add ADDRESS/BITS dev {interface}'")
            }
            Unusable::NoGid { interface, .. } => format!(
                "GIDs are made from the interface's addresses: 'ip link set {interface} down' and up again makes the \
                 driver fill its table anew; show_gids or 'rdma -d link' show it"
            ),
            Unusable::Memlock { kib, .. } => Self::raise_memlock(kib.saturating_mul(1024)),
        }
    }

    /// How `needed` bytes of memory may be locked, wherever the process runs.
    pub fn raise_memlock(needed: u64) -> String {
        let kib = needed.div_ceil(1024);
        format!(
            "raise the limit: in a shell 'ulimit -l {kib}' (for a user for good: '* - memlock {kib}' in \
             /etc/security/limits.conf), for systemd LimitMEMLOCK=infinity in the unit, for containerd the same \
             in containerd.service, since containers inherit it, for Kubernetes \
             'securityContext: {{capabilities: {{add: [IPC_LOCK]}}}}' in the pod; or lower --buffer-size"
        )
    }
}
