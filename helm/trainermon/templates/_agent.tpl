{{/* The container of an agent, and the part of a training pod that has it as a sidecar. */}}

{{/* Arguments: root, spool (path), output (path), outputVolume, subPath, user, nodeName (field), hasStartupProbe. */}}
{{- define "trainermon.agent.container" -}}
{{- $values := .root.Values -}}
name: trainermon
image: {{ include "trainermon.image" .root }}
imagePullPolicy: {{ $values.image.pullPolicy }}
args:
  - node
  - --spool={{ .spool }}
  - --host=0.0.0.0
  - --port={{ $values.agent.port }}
  - --node-name=$(NODE_NAME)
  - --drain-timeout={{ $values.agent.drainTimeoutSeconds }}
  - --log-to-stderr
  {{- if $values.agent.rules }}
  - --rules=/etc/trainermon/agent/rules.yaml
  {{- end }}
  {{- range $values.agent.extraArgs }}
  - {{ . | quote }}
  {{- end }}
env:
  - name: NODE_NAME
    valueFrom:
      fieldRef:
        fieldPath: {{ .nodeName }}
  {{- with include "trainermon.access.env" .root }}{{ . | trim | nindent 2 }}{{ end }}
  {{- with $values.agent.extraEnv }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with $values.agent.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: trainermon
    containerPort: {{ $values.agent.port }}
    protocol: TCP
# The service lives as long as it touches its file; the agent of a run may be busy, and is watched by the service.
{{- if .hasStartupProbe }}
startupProbe:
  exec:
    command: [trainermon, node, --check=service, --spool={{ .spool }}]
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: 60
{{- end }}
livenessProbe:
  exec:
    command: [trainermon, node, --check=service, --spool={{ .spool }}]
  initialDelaySeconds: 30
  periodSeconds: 60
  timeoutSeconds: 10
  failureThreshold: 3
resources:
  {{- toYaml $values.agent.resources | nindent 2 }}
securityContext:
  {{- include "trainermon.containerSecurityContext" .root | nindent 2 }}
  {{- if not (kindIs "invalid" .user) }}
  runAsNonRoot: {{ ne (int .user) 0 }}
  runAsUser: {{ .user }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
volumeMounts:
  - name: trainermon-spool
    mountPath: {{ .spool }}
  - name: {{ .outputVolume }}
    mountPath: {{ .output }}
    {{- with .subPath }}
    subPath: {{ . }}
    {{- end }}
  - name: trainermon-tmp
    mountPath: /tmp
  {{- if $values.agent.rules }}
  - name: trainermon-rules
    mountPath: /etc/trainermon/agent
    readOnly: true
  {{- end }}
  {{- with include "trainermon.access.volumeMounts" .root }}{{ . | trim | nindent 2 }}{{ end }}
{{- end }}

{{- define "trainermon.agent.volumes" -}}
- name: trainermon-tmp
  emptyDir:
    sizeLimit: 1Gi
{{- if .Values.agent.rules }}
- name: trainermon-rules
  configMap:
    name: {{ include "trainermon.fullname" . }}-rules
{{- end }}
{{- with include "trainermon.access.volumes" . }}
{{ . | trim }}
{{- end }}
{{- end }}

{{/* For `initContainers` of the training pod: it starts before the training, and ends after it. */}}
{{- define "trainermon.sidecar.container" -}}
{{- $sidecar := .Values.sidecar -}}
{{- $arguments := dict "root" . "spool" $sidecar.spool.mountPath "user" $sidecar.runAsUser "nodeName" "metadata.name" -}}
{{- $_ := set $arguments "output" $sidecar.output.mountPath -}}
{{- $_ := set $arguments "outputVolume" $sidecar.output.volumeName -}}
{{- $_ := set $arguments "subPath" $sidecar.output.subPath -}}
{{- $_ := set $arguments "hasStartupProbe" $sidecar.holdsTraining -}}
restartPolicy: Always
{{ include "trainermon.agent.container" $arguments }}
{{- end }}

{{/* For `volumes` of the training pod. */}}
{{- define "trainermon.sidecar.volumes" -}}
- name: trainermon-spool
  emptyDir:
    {{- with .Values.sidecar.spool.medium }}
    medium: {{ . }}
    {{- end }}
    sizeLimit: {{ .Values.sidecar.spool.sizeLimit }}
{{- with .Values.sidecar.output }}
{{- if .volume }}
- name: {{ .volumeName }}
  {{- toYaml .volume | nindent 2 }}
{{- end }}
{{- end }}
{{ include "trainermon.agent.volumes" . }}
{{- end }}

{{/* For `env` of the training container. */}}
{{- define "trainermon.sidecar.env" -}}
- name: TRAINERMON_SPOOL
  value: {{ .Values.sidecar.spool.mountPath }}
- name: TRAINERMON_OUTPUT
  value: {{ .Values.sidecar.output.mountPath }}
{{- with .Values.sidecar.runIdLabel }}
- name: TRAINERMON_RUN_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['{{ . }}']
{{- end }}
{{- end }}

{{/* For `volumeMounts` of the training container. */}}
{{- define "trainermon.sidecar.volumeMounts" -}}
- name: trainermon-spool
  mountPath: {{ .Values.sidecar.spool.mountPath }}
- name: {{ .Values.sidecar.output.volumeName }}
  mountPath: {{ .Values.sidecar.output.mountPath }}
  {{- with .Values.sidecar.output.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
