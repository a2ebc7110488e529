//! The suite of every transport, on the simulated one.

use spurline_net_sim::{AfterAnswer, FaultPlan, FaultRates, SimNode, SimRail};
use spurline_transport::conformance::{PeerScript, ScriptEnd, TestPeer, TransportRig, run_suite};
use spurline_transport::{Connector, Service, TransportKind};
use std::sync::Arc;

/// The simulated transport, its channels over a simulated rail or not.
struct Sim(Option<SimRail>);

/// A node, over a rail or not.
struct Node(SimNode, Option<SimRail>);

impl TestPeer for Node {
    fn connector(&self) -> Arc<dyn Connector> {
        match &self.1 {
            None => self.0.connector(),
            Some(rail) => rail.connector(self.0.connector(), TransportKind::Rdma),
        }
    }
    fn kill(&mut self) {
        self.0.kill();
    }
}

impl TransportRig for Sim {
    fn serve_with(&self, service: Arc<dyn Service>) -> Box<dyn TestPeer> {
        Box::new(Node(SimNode::new("sim", service, Arc::new(FaultPlan::new(7, FaultRates::default()))), self.0.clone()))
    }
    fn play_script(&self, script: PeerScript) -> Box<dyn TestPeer> {
        let play = move |header: &_| {
            let (bytes, end) = script(header);
            let after = match end {
                ScriptEnd::Continue => AfterAnswer::Continue,
                ScriptEnd::Close => AfterAnswer::Close,
                ScriptEnd::Stall => AfterAnswer::Stall,
            };
            (bytes, after)
        };
        Box::new(Node(
            SimNode::with_script("sim", play, Arc::new(FaultPlan::new(7, FaultRates::default()))),
            self.0.clone(),
        ))
    }
}

#[test]
fn conforms() {
    run_suite(&Sim(None));
}

#[test]
fn conforms_over_a_rail() {
    let rail = SimRail::new();
    run_suite(&Sim(Some(rail.clone())));
    assert_eq!(rail.channel_count(), 0, "a channel outlived its owner");
}
