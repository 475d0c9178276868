"""Jobs on a Kubernetes cluster with Kubeflow's Training Operator."""
